"""The micro-batch size of "auto": the fastest of those that fit, found once for each model."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import psutil

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.device.environment import read_environment
from kbatch.device.host_memory import read_control_group
from kbatch.device.memory import (
    DeviceMemory,
    gpu_visible,
    nvml_gpu,
    other_processes,
    workers_on_device,
)
from kbatch.document.numbers import readable
from kbatch.document.section import neighbours_text
from kbatch.memory.find import probe_max_batch
from kbatch.memory.probe import OF_SEVERAL_REPLICAS, search_in_place
from kbatch.memory.record import MaxBatchSizeResult, MicroBatchLimit
from kbatch.memory.report import slow_steps_text
from kbatch.memory.workload import STEPS, Load
from kbatch.records.json_codec import load_if_readable, write_record
from kbatch.records.notes import RunNote
from kbatch.search.data import SearchData
from kbatch.throughput.choice import MicroBatchChoice, choice_for_smaller, micro_batch_candidates
from kbatch.throughput.record import TrainingProfile
from kbatch.throughput.update_timing import TIMING, time_micro_batches
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.clock import replica_count
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of, row_shapes
from kbatch.training.fingerprint import model_fingerprint


class FoundMicroBatch(NamedTuple):
    """A micro-batch size and how it was found.

    Attributes:
        size: Examples that go through the device at once.
        most: Most examples that fit.
        memory_bound: Whether more of them were found not to fit.
        search_s: Seconds that probes and timing took now, 0 where an earlier search told it.
        notes: The same in words.
        key: What tells the model, its data and the limits from others.
    """

    size: int
    most: int
    memory_bound: bool
    search_s: float
    notes: tuple[RunNote, ...]
    key: str


class TrainingLeft(NamedTuple):
    """What a search is still to train at its large batch sizes, as far as it is known.

    Attributes:
        examples: Examples of these trainings, or None.
        train_s: Seconds that budgets let them take, or None.
    """

    examples: float | None = None
    train_s: float | None = None

    def seconds(self, example_s: float) -> float | None:
        """Forecast the seconds of training, None where nothing is known."""
        by_examples = None if self.examples is None else self.examples * example_s
        return min((s for s in (by_examples, self.train_s) if s is not None), default=None)


class AutoMicroBatch:
    """Finds the fastest micro-batch that fits, and remembers it for each model and batch size.

    Args:
        largest_batch_size: Largest batch of the search: nothing beyond it is tried.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that is aimed at.
        moments_every: As in `accumulate_gradients`.

    Attributes:
        data: Takes rows of the data of the search.
        checks: Compare parts of a batch with the whole.
    """

    def __init__(
        self,
        *,
        largest_batch_size: int,
        memory_limit_bytes: int | None,
        memory_window: tuple[float, float],
        moments_every: int,
    ):
        self.data = SearchData()
        self.checks = PartsChecks()
        self._largest = largest_batch_size
        self._limit_bytes = memory_limit_bytes
        self._window = memory_window
        self._moments_every = moments_every
        self._found: dict[str, MaxBatchSizeResult] = {}
        self._limits: dict[str, MicroBatchLimit] = {}
        self._fastest = FastestMicroBatch(
            self.checks, largest_batch_size=largest_batch_size, moments_every=moments_every
        )

    def find(
        self,
        model: keras.Model,
        build: Callable[[], keras.Model],
        *,
        source: Source,
        directory: Path | None,
        rows: int,
        left: TrainingLeft | None = None,
    ) -> FoundMicroBatch:
        """Find the size for a model and a batch."""
        key = self._key(model, source)
        result, search_s = self._result(
            key, model=model, build=build, source=source, directory=directory
        )
        most = min(result.max_batch_size, self._limit(key, directory))
        fastest = self._fastest.find(
            model,
            source,
            batch_size=rows,
            most=most,
            key=key,
            directory=directory,
            left_s=None if left is None else left.seconds(self._example_s(result)),
            example_s=self._example_s(result),
        )
        notes = (fastest.note, _memory_note(result, most, search_s))
        bound = most < result.max_batch_size or result.memory_bound
        return FoundMicroBatch(fastest.size, most, bound, search_s + fastest.search_s, notes, key)

    def most(
        self,
        model: keras.Model,
        build: Callable[[], keras.Model],
        *,
        source: Source,
        directory: Path | None,
    ) -> int:
        """Find the most examples that fit at once, and remembers it."""
        key = self._key(model, source)
        result, _ = self._result(key, model=model, build=build, source=source, directory=directory)
        return min(result.max_batch_size, self._limit(key, directory))

    def halve(self, key: str, size: int, directory: Path | None) -> int | None:
        """Take half of a size that ran out of memory after all, and remember it."""
        if size < 2:
            return None
        half = min(size // 2, self._limit(key, directory))
        self._limits[key] = MicroBatchLimit(half)
        if not other_processes():  # Else memory may have run out because of them.
            _save(self._limits[key], _limit_file(directory, key))
        return half

    def _limit(self, key: str, directory: Path | None) -> int:
        """Return the largest size that may be tried; another worker may have learnt of it."""
        known = [
            self._limits.get(key),
            load_if_readable(MicroBatchLimit, _limit_file(directory, key)),
        ]
        return min([self._largest, *(limit.micro_batch_size for limit in known if limit)])

    def _key(self, model: keras.Model, source: Source) -> str:
        limits = (self._rows(model), self._limit_bytes or _memory(), self._window)
        here = read_environment()
        devices = (here.devices, here.versions.get("nvidia-driver"), *_gpu())
        described = repr((model_fingerprint(model), row_shapes(source, model), limits, devices))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _result(
        self,
        key: str,
        *,
        model: keras.Model,
        build: Callable[[], keras.Model],
        source: Source,
        directory: Path | None,
    ) -> tuple[MaxBatchSizeResult, float]:
        """Return what fits, and the seconds that finding it took now."""
        known = self._found.get(key) or load_if_readable(
            MaxBatchSizeResult, _largest_file(directory, key)
        )
        if known is not None:
            self._found[key] = known
            return known, 0.0
        began_s = time.perf_counter()
        self._found[key] = found = self._probed(model, build, source)
        if not found.other_processes:  # Beside others it is that of this search alone.
            _save(found, _largest_file(directory, key))
        return found, time.perf_counter() - began_s

    def _probed(
        self, model: keras.Model, build: Callable[[], keras.Model], source: Source
    ) -> MaxBatchSizeResult:
        rows, replicas = self._rows(model), replica_count(model)
        load = Load(
            build,
            source,
            model.dtype_policy.name,
            accumulate_below=rows,
            moments_every=self._moments_every,
            replicas=replicas,
        )
        search = functools.partial(
            probe_max_batch,
            memory_window=self._window,
            max_batch_size=rows,
            confirm=False,
            largest_first=True,
        )
        return search_in_place(
            load,
            search,
            memory_limit_bytes=self._limit_bytes,
            memory_window=self._window,
            model=lambda: model,
            here_since=None if replicas == 1 else OF_SEVERAL_REPLICAS,
        )

    def _example_s(self, result: MaxBatchSizeResult) -> float:
        """Return the seconds of training on an example, an upper bound for older records."""
        size = result.max_batch_size
        probes = [probe for probe in result.probes if probe.batch_size == size]
        return min(p.step_s or p.duration_s / STEPS for p in probes) / size

    def _rows(self, model: keras.Model) -> int:
        """Return the most examples that a replica has of a batch."""
        return -(-self._largest // replica_count(model))


def _memory() -> tuple[int, int | None, int | None]:
    """Return what decides the limit of a search that is given none: it differs between hosts."""
    group_bytes = read_control_group().memory_limit_bytes
    return psutil.virtual_memory().total, group_bytes, workers_on_device()


def _gpu() -> tuple[float | None, ...]:
    """Return the limit and the power cap of the GPU, which is started; nothing without one."""
    if not gpu_visible():
        return ()
    limit_bytes, gpu = DeviceMemory().limit_bytes or 0, nvml_gpu()
    # To 1 part in 16 or finer: what a driver and a desktop leave differs from start to start.
    step = 2 ** max(0, limit_bytes.bit_length() - 5)
    return limit_bytes // step * step, None if gpu is None else gpu.power_cap_w


def _memory_note(result: MaxBatchSizeResult, size: int, search_s: float) -> RunNote:
    if size < result.max_batch_size:
        larger = result.max_batch_size
        return RunNote.of("larger_ran_out", size=size, larger=larger, more=_beside(result))
    slow = slow_steps_text(result)
    return RunNote.of(
        "most_at_once",
        size=size,
        reason=result.reason,
        search_s=search_s,
        probes=len(result.probes),
        more=_beside(result) + ("" if slow is None else f" {slow}"),
    )


def _beside(result: MaxBatchSizeResult) -> str:
    if not result.other_processes:
        return ""
    return f" {neighbours_text(result.other_processes)} So it is not kept for later searches."


def _largest_file(directory: Path | None, key: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{key}.json"


def _limit_file(directory: Path | None, key: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{key}-limit.json"


def _save(record: object, path: Path | None) -> None:
    if path is not None:
        write_record(record, path)


# Geometric mean of the nets of `benchmarks/auto_micro_batch.py` at eight times their own batches.
_PLAUSIBLE_GAIN = 1.2
# Fewest updates that timing runs: three to warm each of two sizes up, and two rounds of both.
_FEWEST_UPDATES = 10


class TimedMicroBatch(NamedTuple):
    """A micro-batch size for a batch, and how it was found.

    Attributes:
        size: Examples that go through the device at once.
        search_s: Seconds that timing took now, 0 where nothing was timed.
        note: The same in words.
    """

    size: int
    search_s: float
    note: RunNote


class FastestMicroBatch:
    """Chooses the fastest micro-batch size by train steps as they will run, and remembers it.

    Sizes are timed where the search is long enough to repay it: the largest batch of the search
    first, a smaller one only where it is larger than the micro-batch that was chosen for that.

    Args:
        checks: Compare parts of a batch with the whole: speed must not decide on what is trained.
        largest_batch_size: Largest batch of the search.
        moments_every: As in `accumulate_gradients`.
    """

    def __init__(self, checks: PartsChecks, *, largest_batch_size: int, moments_every: int):
        self._checks = checks
        self._largest = largest_batch_size
        self._moments_every = moments_every
        self._profiles: dict[str, TrainingProfile] = {}

    def find(
        self,
        model: keras.Model,
        source: Source,
        *,
        batch_size: int,
        most: int,
        key: str,
        directory: Path | None,
        left_s: float | None = None,
        example_s: float = 0.0,
    ) -> TimedMicroBatch:
        """Choose the size for a batch."""
        largest_fit = equal_parts(batch_size, most)
        reason = self._reason_not_to_time(model, source, batch_size, most, directory)
        if reason is not None:
            note = RunNote.of("parts_not_timed", size=largest_fit, reason=reason)
            return TimedMicroBatch(largest_fit, 0.0, note)
        began_s, timed = time.perf_counter(), False
        for size in dict.fromkeys((max(self._largest, batch_size), batch_size)):
            profile = self._known(model, key, size, directory)
            if profile is None:
                reason = _reason_of_cost(left_s, update_s=size * example_s)
                if reason is not None:
                    note = RunNote.of("parts_not_timed", size=largest_fit, reason=reason)
                    return TimedMicroBatch(largest_fit, 0.0, note)
                timed = True
                profile = self._timed(model, source, size, most, key, directory)
            choice = _choice(profile, most)
            if choice is None:
                continue
            chosen = choice.micro_batch_size
            if size > batch_size:
                whole = choice_for_smaller(batch_size, larger_batch_size=size, chosen=chosen)
                if whole is None:
                    continue
            search_s = time.perf_counter() - began_s if timed else 0.0
            found = min(chosen, batch_size)
            note = _speed_note(choice, size, batch_size, profile.notes)
            return TimedMicroBatch(found, search_s, note)
        search_s = time.perf_counter() - began_s if timed else 0.0
        note = RunNote.of("no_step_timed", size=largest_fit)
        return TimedMicroBatch(largest_fit, search_s, note)

    def _reason_not_to_time(
        self,
        model: keras.Model,
        source: Source,
        batch_size: int,
        most: int,
        directory: Path | None,
    ) -> str | None:
        if len(micro_batch_candidates(batch_size, most)) == 1:
            return "fewer examples at once are never faster"
        if replica_count(model) > 1:
            return "the most that fit, since steps of several replicas are not timed"
        if self._checks.difference(model, source, most=most, directory=directory):
            return "the most that fit, since fewer at once may not train as the whole batch does"
        return None

    def _known(
        self, model: keras.Model, key: str, batch_size: int, directory: Path | None
    ) -> TrainingProfile | None:
        name = _name(key, batch_size)
        known = self._profiles.get(name)
        return known or load_if_readable(TrainingProfile, _profile_file(directory, name))

    def _timed(
        self,
        model: keras.Model,
        source: Source,
        batch_size: int,
        most: int,
        key: str,
        directory: Path | None,
    ) -> TrainingProfile:
        began_s = time.perf_counter()
        others = other_processes()
        notes = (f"{neighbours_text(others)} So times are not kept for later searches.",)
        notes = notes if others else ()
        try:
            batch = batch_of(source, model, batch_size)
        except DataEnded as ended:
            points, notes = (), (*notes, f"The data function gave {ended.rows} examples.")
        else:
            points = time_micro_batches(
                model, batch, largest=most, moments_every=self._moments_every
            )
        profile = TrainingProfile(
            model.name,
            model.dtype_policy.name,
            bool(model.jit_compile),
            points,
            duration_s=round(time.perf_counter() - began_s, 3),
            notes=notes,
            environment=read_environment(),
        )
        name = _name(key, batch_size)
        self._profiles[name] = profile
        file = _profile_file(directory, name)
        if file is not None and not others:  # What they do now slows the sizes by chance.
            write_record(profile, file)
        return profile


def _reason_of_cost(left_s: float | None, *, update_s: float) -> str | None:
    cost_s = max(TIMING.time_budget_s, _FEWEST_UPDATES * update_s)
    if left_s is None:
        if cost_s == TIMING.time_budget_s:
            return None
        return (
            f"the most that fit, since timing smaller ones would take {readable(cost_s, 2)} s and "
            "it is not known how much training is left to repay it"
        )
    if left_s * (1 - 1 / _PLAUSIBLE_GAIN) >= cost_s:
        return None
    return (
        "the most that fit, since smaller ones could not save what timing them takes in about "
        f"{readable(left_s, 2)} s of training at the largest sizes"
    )


def _choice(profile: TrainingProfile, most: int) -> MicroBatchChoice | None:
    """Choose among what was timed and fits; None where nothing was."""
    points = tuple(point for point in profile.points if point.micro_batch_size <= most)
    fits = dataclasses.replace(profile, points=points)
    return fits.choice if fits.measured else None


def _speed_note(
    choice: MicroBatchChoice, timed_size: int, batch_size: int, others: Sequence[str]
) -> RunNote:
    size, more = choice.micro_batch_size, "".join(f" {other}" for other in others)
    if timed_size > batch_size:
        return RunNote.of("whole_is_fastest", larger=timed_size, size=size, more=more)
    if choice.gain is None:
        return RunNote.of("parts_not_faster", size=size, more=more)
    gain, interval = choice.gain.value, choice.gain.interval
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return RunNote.of("parts_faster", size=size, gain=gain, low=low, high=high, more=more)


def _name(key: str, batch_size: int) -> str:
    """Return what tells one timing from others: another machine or version needs its own."""
    here = read_environment()
    versions = sorted(here.versions.items())
    described = repr((key, batch_size, here.cpu, here.cpu_count, here.devices, versions))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _profile_file(directory: Path | None, name: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{name}-times.json"
