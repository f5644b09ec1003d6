"""How many examples go through the device at once: a size that is given, or the fastest found."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import keras
import psutil

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.device.control_group import read_control_group
from kbatch.device.environment import read_environment
from kbatch.device.failures import ran_out_of_memory
from kbatch.device.memory import (
    DeviceMemory,
    gpu_visible,
    nvml_gpu,
    other_processes,
    workers_on_device,
)
from kbatch.document.numbers import format_number
from kbatch.document.section import neighbours_text
from kbatch.errors import OutOfMemoryError
from kbatch.memory.find import probe_max_batch
from kbatch.memory.probe import OF_SEVERAL_REPLICAS, open_probes
from kbatch.memory.record import MaxBatchSizeResult, MicroBatchLimit
from kbatch.memory.report import slow_steps_text
from kbatch.memory.search import MEMORY_WINDOW
from kbatch.memory.workload import STEPS, Workload
from kbatch.records.json_codec import load_if_readable, write_record
from kbatch.records.notes import RunNote
from kbatch.records.usage import GpuProcess
from kbatch.throughput.choice import MicroBatchChoice, micro_batch_candidates
from kbatch.throughput.record import TrainingProfile
from kbatch.throughput.update_timing import TIMING, time_micro_batches
from kbatch.training.accumulation.known_checks import PartsChecks
from kbatch.training.data.sample_rows import DataEnded, Samples, Source, batch_of, row_shapes
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import replica_count, user_step

# Every how many updates a trial measures the moments of its gradients.
MOMENTS_EVERY = 8
# The cap of a laptop moves with what its processor takes. Clocks go with about the third root.
_SAME_CAP = 1.1
# Geometric mean of the nets of `benchmarks/auto_micro_batch.py` at eight times their own batches.
_PLAUSIBLE_GAIN = 1.2
# Fewest updates that timing runs: three to warm each of two sizes up, and two rounds of both.
_FEWEST_UPDATES = 10

Record = TypeVar("Record")


class TrainingLeft(NamedTuple):
    """What a search is still to train at its large batch sizes, as far as it is known."""

    examples: float | None = None
    train_s: float | None = None

    def seconds(self, example_s: float) -> float | None:
        """Forecast the seconds of training, None where nothing is known."""
        by_examples = None if self.examples is None else self.examples * example_s
        return min((s for s in (by_examples, self.train_s) if s is not None), default=None)


@dataclasses.dataclass(eq=False)
class SearchMicroBatches:
    """What the trials of a search share: limits, data, checks, and the sizes found so far."""

    largest_batch_size: int
    memory_limit_bytes: int | None  # None for what the device has.
    data: Samples = dataclasses.field(default_factory=Samples)
    checks: PartsChecks = dataclasses.field(default_factory=PartsChecks)
    # Records of `MicroBatchCache`, by the name of their file.
    known: dict[str, Any] = dataclasses.field(default_factory=dict)


class FoundMicroBatch(NamedTuple):
    """A micro-batch size and how it was found."""

    size: int
    most: int  # Most examples that fit.
    memory_bound: bool  # Whether more of them were found not to fit.
    search_s: float  # Seconds that probes and timing took now.
    notes: tuple[RunNote, ...]


@dataclasses.dataclass(eq=False)
class MicroBatchCache:
    """What fits of one model and its data, what is fastest and what ran out, each measured once."""

    search: SearchMicroBatches
    model: keras.Model
    build: Callable[[], keras.Model]
    source: Source
    directory: Path | None

    def __post_init__(self):
        search, here = self.search, read_environment()
        # The most examples that a replica has of a batch.
        self._rows = -(-search.largest_batch_size // replica_count(self.model))
        self._measured_s: dict[str, float] = {}
        # Without a limit these decide it: they differ between hosts.
        group_bytes = read_control_group().memory_limit_bytes
        host = (psutil.virtual_memory().total, group_bytes, workers_on_device())
        limits = (self._rows, search.memory_limit_bytes or host)
        devices: tuple[Any, ...] = (here.devices, here.versions.get("nvidia-driver"))
        if gpu_visible():
            limit_bytes = DeviceMemory().limit_bytes or 0
            # What a driver and a desktop leave differs between starts: to 1 part in 16, or finer.
            step = 2 ** max(0, limit_bytes.bit_length() - 5)
            devices += (limit_bytes // step * step,)
        shapes = row_shapes(self.source, self.model)
        self.key = _digest((model_fingerprint(self.model), shapes, limits, devices))

    @property
    def _may_cut(self) -> bool:
        return user_step(self.model) is None

    def fastest(self, batch_size: int, left: TrainingLeft | None = None) -> FoundMicroBatch:
        """Choose the fastest size for a batch by train steps, if training is left to repay them."""
        result = self._fitting()
        # The most that fit at once, and did not run out of memory in training.
        most = min(result.max_batch_size, self._limit())
        if most < batch_size:
            self._check_cutting(most)
        size, note = self._fastest(batch_size, most, left or TrainingLeft())
        fits, beside = result.max_batch_size, neighbours_text(result.other_processes)
        more = f" {beside} So it is not kept for later searches." if beside else ""
        if most < fits:
            of_memory = RunNote.of("larger_ran_out", size=most, larger=fits, more=more)
        else:
            slow = slow_steps_text(result)
            of_memory = RunNote.of(
                "most_at_once",
                size=most,
                reason=result.reason,
                search_s=self._measured_s.get(self.key, 0.0),
                probes=len(result.probes),
                more=more + (f" {slow}" if slow else ""),
            )
        bound, search_s = most < fits or result.memory_bound, sum(self._measured_s.values())
        return FoundMicroBatch(size, most, bound, search_s, (note, of_memory))

    def halve(self, size: int) -> int:
        """Return half of a size that ran out of memory in training, and remember it."""
        self._check_cutting(size // 2)
        half = min(size // 2, self._limit())
        # Memory may have run out because of other processes.
        self._keep(f"{self.key}-limit", MicroBatchLimit(half), beside=other_processes())
        return half

    def _check_cutting(self, most: int) -> None:
        if not self._may_cut:
            raise OutOfMemoryError(
                "A `train_step` of your own runs on whole batches, and at most "
                f"{most} examples fit at once: leave out larger `batch_sizes`, or let the build "
                f"function call `kbatch.accumulate_gradients(model, {most}, exact=True)`. "
                f"Received: model of class {type(self.model).__name__}.",
                None,
                self._fitting().limit_bytes,
            )

    def _fastest(self, batch_size: int, most: int, left: TrainingLeft) -> tuple[int, RunNote]:
        """Time the largest batch of the search, or this one where that does not decide."""
        largest, checks, reason = self.search.largest_batch_size, self.search.checks, None
        if len(micro_batch_candidates(batch_size, most)) == 1:
            reason = "fewer examples at once are never faster"
        elif replica_count(self.model) > 1:
            reason = "the most that fit, since steps of several replicas are not timed"
        elif not self._may_cut:
            reason = "a `train_step` of your own trains on whole batches"
        elif not checks.find(self.model, self.source, most=most, directory=self.directory).equal:
            reason = "the most that fit, since fewer at once may not train as the whole batch does"
        timed_sizes = dict.fromkeys((max(largest, batch_size), batch_size))
        for size in timed_sizes if reason is None else ():
            profile = self._times(size, most, left)
            if isinstance(profile, str):
                reason = profile
                break
            fits = tuple(point for point in profile.points if point.micro_batch_size <= most)
            fitting = dataclasses.replace(profile, points=fits)
            if not fitting.measured:
                continue
            choice = fitting.choice
            # What smaller parts gain grows with the batch: what fits in a part of a larger one goes
            # whole.
            if size == batch_size or batch_size <= choice.micro_batch_size:
                note = _speed_note(choice, size, batch_size, profile.notes)
                return min(choice.micro_batch_size, batch_size), note
        largest_fit = equal_parts(batch_size, most)
        if reason is None:
            return largest_fit, RunNote.of("no_step_timed", size=largest_fit)
        return largest_fit, RunNote.of("parts_not_timed", size=largest_fit, reason=reason)

    def _fitting(self) -> MaxBatchSizeResult:
        known = self._recall(MaxBatchSizeResult, self.key)
        if known is not None:
            return known
        search, replicas, began_s = self.search, replica_count(self.model), time.perf_counter()
        workload = Workload(
            self.build,
            self.source,
            self.model.dtype_policy.name,
            accumulate_below=self._rows if self._may_cut else 0,
            moments_every=MOMENTS_EVERY,
            replicas=replicas,
        )
        with open_probes(
            workload,
            memory_limit_bytes=search.memory_limit_bytes,
            memory_window=MEMORY_WINDOW,
            model=lambda: self.model,
            here_since=None if replicas == 1 else OF_SEVERAL_REPLICAS,
        ) as probes:
            found = probe_max_batch(
                probes,
                memory_window=MEMORY_WINDOW,
                max_batch_size=self._rows,
                confirm=False,
                largest_first=True,
            )
        self._measured_s[self.key] = time.perf_counter() - began_s
        self._keep(self.key, found, beside=found.other_processes)
        return found

    def _limit(self) -> int:
        """Return the largest size that may be tried; another worker may have learnt of it."""
        name = f"{self.key}-limit"
        known = [self.search.known.get(name), load_if_readable(MicroBatchLimit, self._file(name))]
        sizes = [limit.micro_batch_size for limit in known if limit]
        return min([self.search.largest_batch_size, *sizes])

    def _times(self, batch_size: int, most: int, left: TrainingLeft) -> TrainingProfile | str:
        """Return the times of steps in parts of up to `most` examples, or why none are taken."""
        name = _times_name(self.key, batch_size)
        known = self._recall(TrainingProfile, name)
        if known is not None and _under_present_cap(known):
            return known
        if (reason := self._reason_of_cost(left, batch_size)) is not None:
            return reason
        others, points, gpus, notes = other_processes(), (), (), []
        began_s = time.perf_counter()
        if others:
            notes.append(f"{neighbours_text(others)} So times are not kept for later searches.")
        try:
            batch = batch_of(self.source, self.model, batch_size)
        except DataEnded as ended:
            notes.append(f"The data function gave {ended.rows} examples.")
        except Exception as error:
            if not ran_out_of_memory(error, smaller_worked=True):
                raise
            notes.append(f"The device has no room for a batch of {batch_size} examples.")
        else:
            points, gpus = time_micro_batches(
                self.model, batch, largest=most, moments_every=MOMENTS_EVERY
            )
        self._measured_s[name] = duration_s = round(time.perf_counter() - began_s, 3)
        profile = TrainingProfile(
            self.model.name,
            self.model.dtype_policy.name,
            bool(self.model.jit_compile),
            points,
            duration_s=duration_s,
            notes=tuple(notes),
            environment=read_environment(),
            gpus=gpus,
        )
        self._keep(name, profile, beside=others)  # What they do now slows the sizes by chance.
        return profile

    def _reason_of_cost(self, left: TrainingLeft, size: int) -> str | None:
        """Say why updates of a size are not timed, None where the training left repays it."""
        result = self._fitting()
        fits = result.max_batch_size
        probes = [probe for probe in result.probes if probe.batch_size == fits]
        # The whole probe is an upper bound, where no step after the first was timed.
        example_s = min(p.step_s or p.duration_s / STEPS for p in probes) / fits
        cost_s = max(TIMING.time_budget_s, _FEWEST_UPDATES * size * example_s)
        left_s = left.seconds(example_s)
        if left_s is None and cost_s > TIMING.time_budget_s:
            return (
                "the most that fit, since timing smaller ones would take "
                f"{format_number(cost_s, 2)} s and it is not known how much training is left to "
                "repay it"
            )
        if left_s is not None and left_s * (1 - 1 / _PLAUSIBLE_GAIN) < cost_s:
            return (
                "the most that fit, since smaller ones could not save what timing them takes in "
                f"about {format_number(left_s, 2)} s of training at the largest sizes"
            )
        return None

    def _recall(self, kind: type[Record], name: str) -> Record | None:
        known = self.search.known.get(name) or load_if_readable(kind, self._file(name))
        if known is not None:
            self.search.known[name] = known
        return known

    def _keep(self, name: str, record: Any, *, beside: Sequence[GpuProcess]) -> None:
        """Keep a record for this search, and for later ones where nothing ran beside it."""
        self.search.known[name] = record
        if not beside and (file := self._file(name)) is not None:
            write_record(record, file)

    def _file(self, name: str) -> Path | None:
        return self.directory and self.directory / "kbatch-micro-batches" / f"{name}.json"


def _under_present_cap(known: TrainingProfile) -> bool:
    """Return whether times were taken under about the power cap of now."""
    before_w = known.gpus[0].power_cap_w if known.gpus and gpu_visible() else None
    gpu = nvml_gpu() if before_w else None
    if not before_w or gpu is None or not gpu.power_cap_w:
        return True
    return 1 / _SAME_CAP <= gpu.power_cap_w / before_w <= _SAME_CAP


def _times_name(key: str, batch_size: int) -> str:
    """Name the file of a timing: another machine or version needs its own."""
    here = read_environment()
    versions = sorted(here.versions.items())
    described = (key, batch_size, here.cpu, here.cpu_count, here.devices, versions)
    return f"{_digest(described)}-times"


def _digest(described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


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
