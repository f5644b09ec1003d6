"""The fastest micro-batch size of those that fit, timed for a model and a batch size."""

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import keras

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.device.device_memory import other_processes
from kbatch.device.environment import read_environment
from kbatch.document.number_text import readable
from kbatch.document.where_measured import neighbours_text
from kbatch.records.json_files import load_if_readable, write_record
from kbatch.throughput.choice import MicroBatchChoice, choice_for_smaller, micro_batch_candidates
from kbatch.throughput.micro_batch_timing import TIMING, time_micro_batches
from kbatch.throughput.training_profile_record import TrainingProfile
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.data.data_source import DataEnded, Source, batch_of
from kbatch.training.replica_meter import replica_count

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
    note: str


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
        """Chooses the size for a batch.

        Args:
            model: The model of the trial, built; it stays as it is.
            source: Its data.
            batch_size: Examples of an update.
            most: Most examples that fit at once.
            key: What tells the model and its data from others.
            directory: Where times are kept for later runs of the search, or None.
            left_s: Seconds of training that the search has left at its large sizes, None where
                that is not known: sizes are timed only where they could save as much.
            example_s: Seconds of training on an example, as far as they are known.
        """
        largest_fit = equal_parts(batch_size, most)
        reason = self._reason_not_to_time(model, source, batch_size, most, directory)
        if reason is not None:
            return TimedMicroBatch(largest_fit, 0.0, f"Micro-batches of {largest_fit}: {reason}.")
        began_s, timed = time.perf_counter(), False
        for size in dict.fromkeys((max(self._largest, batch_size), batch_size)):
            profile = self._known(model, key, size, directory)
            if profile is None:
                reason = _reason_of_cost(left_s, update_s=size * example_s)
                if reason is not None:
                    note = f"Micro-batches of {largest_fit}: {reason}."
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
            note = " ".join((_note(choice, size, batch_size), *profile.notes))
            return TimedMicroBatch(found, search_s, note)
        search_s = time.perf_counter() - began_s if timed else 0.0
        note = f"Micro-batches of {largest_fit}, the most that fit: no step could be timed."
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
        return known or load_if_readable(TrainingProfile, _file(directory, name))

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
        file = _file(directory, name)
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
    """Chooses among what was timed and fits; None where nothing was."""
    points = tuple(point for point in profile.points if point.micro_batch_size <= most)
    fits = dataclasses.replace(profile, points=points)
    return fits.choice if fits.measured else None


def _note(choice: MicroBatchChoice, timed_size: int, batch_size: int) -> str:
    if timed_size > batch_size:
        return (
            f"The batch goes through whole: a larger one, of {timed_size}, is fastest in "
            f"micro-batches of {choice.micro_batch_size}."
        )
    if choice.gain is None:
        size = choice.micro_batch_size
        return f"Micro-batches of {size} were timed: smaller ones are not clearly faster."
    interval = choice.gain.interval
    between = f" ({readable(interval.low)} to {readable(interval.high)})" if interval else ""
    return (
        f"Micro-batches of {choice.micro_batch_size} train {readable(choice.gain.value)}{between} "
        "times as fast as the most that fit."
    )


def _name(key: str, batch_size: int) -> str:
    """Tells one timing from others: on another machine or with another version it is made anew."""
    here = read_environment()
    versions = sorted(here.versions.items())
    described = repr((key, batch_size, here.cpu, here.cpu_count, here.devices, versions))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _file(directory: Path | None, name: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{name}-times.json"
