"""Changes to an input pipeline that leave its examples as they are, tried in training.

TensorFlow has no public way to look into a pipeline: its stages are found by walking it, and the
last ones put together again. What is not known here is left alone.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.machine import usable_cores
from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    InputPass,
    block_length,
    epochs_of,
    rate_of,
    read_by_workers,
    reading_block,
)
from kbatch.input_pipeline.result import ChangeRecord
from kbatch.library_internals import dataset_argument, dataset_graph, inputs_of_dataset
from kbatch.library_internals import dataset_function as function_of
from kbatch.page.numbers import format_number, join_words, memory_text, one_line
from kbatch.records.notes import Note
from kbatch.timing import FEWEST_ROUNDS, interleaved
from kbatch.training.data.forms import rows_of
from kbatch.training.step_call import StepCall

# A change with the changed pipeline, None where a reason says why it is not to be tried.
Change = tuple[ChangeRecord, tf.data.Dataset | None]

# Batches that a block takes at least after the first: one to settle and one that counts.
_LATER_BATCHES = 2


def try_changes(
    given: Any,  # The data as they were given.
    reading: InputPass,
    step: StepCall,
    *,
    even: bool,
    cache_bytes: int,
    budget_s: float,
) -> tuple[ChangeRecord, ...]:
    """Train on each changed pipeline and on the original, in turn."""
    budget_s = max(0.0, budget_s)  # The pipeline as it is may have taken more than its part.
    source, end_s = reading.source, time.perf_counter() + budget_s
    if isinstance(given, keras.utils.PyDataset):
        changes = worker_changes(given)
    else:
        changes = dataset_changes(source, cache_bytes=cache_bytes, budget_s=budget_s)
    # Three rounds are made in any case: changes for which there is no time are not tried.
    left_s, first_batch_s = max(0.0, end_s - time.perf_counter()), reading.record.first_batch_s
    block_s = reading.duration_s
    if even:
        rows = rows_of(reading.batches[0])
        batch_s = rows * reading.record.duration_s / reading.record.examples
        block_s = first_batch_s + _LATER_BATCHES * (batch_s + reading.step_s)
    sources = {record.name: changed for record, changed in changes if changed is not None}
    names = list(sources)[: max(0, int(left_s / (FEWEST_ROUNDS * block_s)) - 1)]
    length = BlockLength(0.0, reading.duration_s, reading.duration_s, "start")
    if even:
        contenders = len(names) + 1
        shares = block_length(left_s, contenders=contenders, starts_s=contenders * first_batch_s)
        # What a block takes beside the batches that count.
        shares = shares._replace(longest_s=max(0.0, shares.longest_s - block_s))
        length = reading.counted(shares, trains=True)
        if length.counting == "epochs" and reading.epoch is not None:
            batches, epoch_s = reading.epoch
            block_s = epoch_s + batches * reading.step_s
            names = names[: max(0, int(left_s / (FEWEST_ROUNDS * block_s)) - 1)]
    needed_s = FEWEST_ROUNDS * block_s * (len(sources) + 1)
    short = Note.of("no_time_for_changes", needed=format_number(needed_s, 2))
    reasons = {name: short for name in sources if name not in names}

    def train(name: str) -> Block | None:
        if name in reasons:
            return None
        try:
            return reading_block(sources[name] if name else source, length, step)
        except Exception as error:  # Whatever the changed pipeline raises: the others go on.
            if not name:
                raise
            reasons[name] = _failed(error)
            return None

    contending = {name: functools.partial(train, name) for name in ("", *names) if names}
    found = interleaved(contending, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of([block for block in blocks if block]) for name, blocks in found.items()}

    def ended(record: ChangeRecord) -> ChangeRecord:
        if record.reason is not None or record.name in reasons:
            return dataclasses.replace(record, reason=record.reason or reasons[record.name])
        return dataclasses.replace(record, original=rates[""], changed=rates[record.name])

    return tuple(ended(record) for record, _ in changes)


def _failed(error: Exception) -> Note:
    return Note.of("change_failed", error=one_line(str(error)) or type(error).__name__)


def _untried(record: ChangeRecord, reason: Note) -> Change:
    return dataclasses.replace(record, reason=reason), None


def dataset_changes(dataset: tf.data.Dataset, *, cache_bytes: int, budget_s: float) -> list[Change]:
    """Find the changes to a `tf.data` pipeline: a prefetch, a parallel map and a cache."""
    prefetch = ChangeRecord("prefetch", ".prefetch(tf.data.AUTOTUNE)")
    cache = ChangeRecord("cache_in_memory", ".cache()")
    ended_by = next(kind for kind in map(kind_of, chain_of(dataset)) if kind != "Options")
    try:
        cached = _cached(cache, dataset, cache_bytes=cache_bytes, budget_s=budget_s * FILL_SHARE)
    except (tf.errors.OpError, InputError) as error:
        cached = _untried(cache, Note.of("data_error", error=one_line(str(error))))
    return [
        _untried(prefetch, Note.of("has_prefetch"))
        if ended_by == "Prefetch"
        else (prefetch, dataset.prefetch(tf.data.AUTOTUNE)),
        _parallel_map(dataset),
        cached,
    ]


# Operations that call Python: `tf.py_function` and `tf.numpy_function`.
_PYTHON = "PyFunc"


def python_note(dataset: tf.data.Dataset) -> Note | None:
    """Return a note that names the maps which call Python, None without any."""
    maps = [stage for stage in all_stages(dataset) if kind_of(stage) in ("Map", "ParallelMap")]
    names = [name_of(one) for one in maps if has_operation(one, _PYTHON)]
    return Note.of("map_calls_python", names=join_words(dict.fromkeys(names))) if names else None


def name_of(stage: Any) -> str:
    """Return the name of the function of a map."""
    name = getattr(function_of(stage), "__name__", "function")
    return "function" if name == "<lambda>" else name


def _parallel_map(dataset: tf.data.Dataset) -> Change:
    record = ChangeRecord("parallel_map", ".map(function, num_parallel_calls=tf.data.AUTOTUNE)")
    try:
        changed, maps = with_parallel_maps(dataset)
    except Exception as error:  # The user's function is traced again, and may raise anything.
        return _untried(record, _failed(error))
    if not maps:
        return _untried(record, Note.of("no_serial_map"))
    code = "; ".join(f".map({name_of(one)}, num_parallel_calls=tf.data.AUTOTUNE)" for one in maps)
    condition = None if all(map(is_stateless, maps)) else Note.of("called_by_threads")
    if any(has_operation(one, _PYTHON) for one in maps):
        condition = Note.of("threads_share_lock")
    found = dataclasses.replace(record, code=code, condition=condition)
    return found, changed


# Share of the time in which a cache is filled, the pipeline's own or one that is tried.
FILL_SHARE = 0.3
# Elements of two passes that are compared.
_COMPARED = 8
# A cache above any of these would give the first epoch again and again.
_RANDOM_STAGES, _RANDOM_OPERATIONS = {"Shuffle", "Random"}, ("Random", "Rng", "Shuffle")


def _cached(
    record: ChangeRecord, dataset: tf.data.Dataset, *, cache_bytes: int, budget_s: float
) -> Change:
    """Fill a cache at the end of a pipeline."""
    stages = all_stages(dataset)
    if any(kind_of(stage) == "Cache" or has_operation(stage, "CacheDataset") for stage in stages):
        return _untried(record, Note.of("has_cache"))
    if any(
        kind_of(stage) in _RANDOM_STAGES or has_operation(stage, *_RANDOM_OPERATIONS)
        for stage in stages
    ):
        return _untried(record, Note.of("cache_freezes"))
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return _untried(record, Note.of("endless_data"))
    first: list[list[np.ndarray]] = []
    end_s = time.perf_counter() + budget_s / 4
    for element in dataset.take(_COMPARED):
        first.append(_arrays(element))
        if time.perf_counter() > end_s:
            break
    again = [_arrays(element) for element in dataset.take(len(first))]
    leaves = zip(itertools.chain(*first), itertools.chain(*again), strict=False)
    same = all(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in leaves)
    if not len(first) == len(again) > 0 or not same:
        return _untried(record, Note.of("cache_freezes"))
    cached, end_s = dataset.cache(), time.perf_counter() + budget_s
    full, size_bytes = _filled(cached, end_s=end_s, most_bytes=cache_bytes)
    if size_bytes > cache_bytes:
        return _untried(record, Note.of("cache_too_large", most=memory_text(cache_bytes)))
    if not full:
        return _untried(record, Note.of("cache_not_full", seconds=budget_s))
    condition = Note.of("cache_takes", size=memory_text(size_bytes))
    return dataclasses.replace(record, condition=condition), cached


def _filled(
    cache: tf.data.Dataset, *, end_s: float, most_bytes: float = math.inf
) -> tuple[bool, int]:
    """Read a cache until time or memory is spent: whether it is full, and its bytes so far."""
    size_bytes = epoch = 0
    with contextlib.closing(epochs_of(cache)) as elements:
        for epoch, element in elements:
            if epoch > 0 or size_bytes > most_bytes or time.perf_counter() > end_s:
                break
            if math.isfinite(most_bytes):
                size_bytes += _bytes(_arrays(element))
    return epoch > 0, size_bytes


def fill_cache(source: tf.data.Dataset, budget_s: float) -> str | None:
    """Make the pass that fills the pipeline's own cache in memory; say why it is not full."""
    stages, end_s = all_stages(source), time.perf_counter() + budget_s
    if any(has_operation(stage, "CacheDataset") for stage in stages):
        return "it stands in a function of `interleave` or `flat_map`"
    try:
        # Those below another cache are filled with it.
        caches = [stage for stage in stages if kind_of(stage) == "Cache"]
        if not all(_filled(cache, end_s=end_s)[0] for cache in caches):
            return f"{budget_s:.2g} s were too short"
    except InputError as error:  # A stage above may leave broken elements out.
        return f"the data below it raised an error: {one_line(str(error))}"
    return None


def _arrays(element: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(element, expand_composites=True)]


def _bytes(element: Iterable[np.ndarray]) -> int:
    texts = (leaf.ravel() for leaf in element if leaf.dtype == object)
    numbers = (leaf.nbytes for leaf in element if leaf.dtype != object)
    return sum(numbers) + sum(len(text) for leaf in texts for text in leaf)


def worker_changes(dataset: keras.utils.PyDataset) -> list[Change]:
    """Find the settings of a `PyDataset` to try: more threads."""
    workers = max(2, usable_cores())
    record = ChangeRecord("more_workers", f"workers={workers}", Note.of("rows_by_threads"))
    if dataset.workers >= workers:
        return [_untried(record, Note.of("worker_per_core"))]
    return [(record, read_by_workers(dataset, workers))]


# The stages of a `tf.data` pipeline.


def chain_of(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline from its end down to where it branches or starts."""
    stages: list[Any] = [dataset]
    while len(below := inputs_of_dataset(stages[-1])) == 1:
        stages += below
    return stages


def all_stages(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline, those of all branches too, each above those below it."""
    found: list[Any] = []
    waiting: list[Any] = [dataset]
    while waiting:
        stage = waiting.pop(0)
        if all(stage is not one for one in found):
            found.append(stage)
            waiting += inputs_of_dataset(stage)
    return found


def kind_of(stage: Any) -> str:
    """Name the kind of a stage, such as `"Map"`."""
    return type(stage).__name__.removeprefix("_").removesuffix("Dataset")


def is_stateless(stage: Any) -> bool:
    """Return whether the function of a map has no state: no random numbers, no Python code."""
    return not any(one.op_def.is_stateful for one in dataset_graph(stage).get_operations())


def has_operation(stage: Any, *words: str) -> bool:
    """Return whether the traced function of a stage runs an operation with one of the words."""
    traced = dataset_graph(stage)
    if traced is None:
        return False
    graph = traced.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return any(word in node.op for node in nodes for word in words)


def with_parallel_maps(dataset: tf.data.Dataset) -> tuple[Any, list[Any]]:
    """Return a pipeline whose last maps make several calls at once, and these maps."""
    # Where a shuffle has a seed, its order may be another.
    stages = chain_of(dataset)
    known = next((i for i, s in enumerate(stages) if kind_of(s) not in _AGAIN), len(stages))
    maps = [i for i, stage in enumerate(stages[:known]) if kind_of(stage) == "Map"]
    if not maps:
        return dataset, []
    changed = stages[maps[-1] + 1]
    for stage in reversed(stages[: maps[-1] + 1]):
        changed = _AGAIN[kind_of(stage)](changed, stage)
    return changed, [stages[i] for i in reversed(maps)]


def _cut(stage: Any) -> dict[str, bool]:
    return {"drop_remainder": bool(dataset_argument(stage, "drop_remainder"))}


_AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    "Map": lambda d, s: d.map(
        function_of(s), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ),
    "Batch": lambda d, s: d.batch(dataset_argument(s, "batch_size"), **_cut(s)),
    "PaddedBatch": lambda d, s: d.padded_batch(
        dataset_argument(s, "batch_size"),
        dataset_argument(s, "padded_shapes"),
        dataset_argument(s, "padding_values"),
        **_cut(s),
    ),
    "Prefetch": lambda d, s: d.prefetch(int(dataset_argument(s, "buffer_size"))),
    "Shuffle": lambda d, s: d.shuffle(
        dataset_argument(s, "buffer_size"),
        reshuffle_each_iteration=dataset_argument(s, "reshuffle_each_iteration"),
    ),
    "Repeat": lambda d, s: d.repeat(dataset_argument(s, "count")),
    "Options": lambda d, s: d.with_options(s.options()),
}
