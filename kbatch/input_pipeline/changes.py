"""Changes to an input pipeline that do not change its examples, tried in training.

TensorFlow has no public function to change a pipeline. This module finds its stages and builds the
last ones again. It does not touch stages that it does not know.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
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

# A change and the changed pipeline. If it cannot be tried, the pipeline is None.
Change = tuple[ChangeRecord, tf.data.Dataset | None]

# A block has at least two more batches after the first: one that does not count, and one that does.
_LATER_BATCHES = 2


def try_changes(
    data: Any,  # The data as the user gave them.
    reading: InputPass,
    step: StepCall,
    *,
    even: bool,
    cache_bytes: int,
    budget_s: float,
) -> tuple[ChangeRecord, ...]:
    """Train on the original pipeline and on each changed one, in shuffled rounds."""
    budget_s = max(0.0, budget_s)
    source, end_s = reading.source, time.perf_counter() + budget_s
    if isinstance(data, keras.utils.PyDataset):
        changes = worker_changes(data)
    else:
        changes = dataset_changes(source, cache_bytes=cache_bytes, budget_s=budget_s)
    # A change is tried only if there is time for three rounds of it.
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
        count = len(names) + 1
        shares = block_length(left_s, contenders=count, starts_s=count * first_batch_s)
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
        except Exception as error:  # A changed pipeline may raise anything. The others continue.
            if not name:
                raise
            reasons[name] = _failed(error)
            return None

    # The name "" is the original pipeline.
    contenders = {name: functools.partial(train, name) for name in ("", *names) if names}
    blocks = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of(list(filter(None, results))) for name, results in blocks.items()}
    records = []
    for record, _ in changes:
        if reason := record.reason or reasons.get(record.name):
            records.append(dataclasses.replace(record, reason=reason))
        else:
            rate = rates[record.name]
            records.append(dataclasses.replace(record, original=rates[""], changed=rate))
    return tuple(records)


def _failed(error: Exception) -> Note:
    return Note.of("change_failed", error=one_line(str(error)) or type(error).__name__)


def _untried(record: ChangeRecord, reason: Note) -> Change:
    return dataclasses.replace(record, reason=reason), None


def dataset_changes(dataset: tf.data.Dataset, *, cache_bytes: int, budget_s: float) -> list[Change]:
    """Find the changes to a `tf.data` pipeline: a prefetch, a parallel map and a cache."""
    prefetch = ChangeRecord("prefetch", ".prefetch(tf.data.AUTOTUNE)")
    cache = ChangeRecord("cache_in_memory", ".cache()")
    last_kind = next(kind for kind in map(kind_of, chain_of(dataset)) if kind != "Options")
    try:
        cached = _cached(cache, dataset, cache_bytes=cache_bytes, budget_s=budget_s * FILL_SHARE)
    except (tf.errors.OpError, InputError) as error:
        cached = _untried(cache, Note.of("data_error", error=one_line(str(error))))
    return [
        _untried(prefetch, Note.of("has_prefetch"))
        if last_kind == "Prefetch"
        else (prefetch, dataset.prefetch(tf.data.AUTOTUNE)),
        _parallel_map(dataset),
        cached,
    ]


# Part of the names of the operations behind `tf.py_function` and `tf.numpy_function`.
_PYTHON = "PyFunc"


def python_note(dataset: tf.data.Dataset) -> Note | None:
    """Return a note that names the maps which call Python, if there are any."""
    maps = [stage for stage in all_stages(dataset) if kind_of(stage) in ("Map", "ParallelMap")]
    names = [name_of(stage) for stage in maps if has_operation(stage, _PYTHON)]
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
    names = map(name_of, maps)
    code = "; ".join(f".map({name}, num_parallel_calls=tf.data.AUTOTUNE)" for name in names)
    condition = None if all(map(is_stateless, maps)) else Note.of("called_by_threads")
    if any(has_operation(stage, _PYTHON) for stage in maps):
        condition = Note.of("threads_share_lock")
    return dataclasses.replace(record, code=code, condition=condition), changed


# Share of the time budget for filling a cache.
FILL_SHARE = 0.3
# Number of elements that must be equal in two passes over the data before a cache is tried.
_COMPARED = 8
# With a cache after any of these, each epoch would be the same as the first.
_RANDOM_STAGES, _RANDOM_OPERATIONS = {"Shuffle", "Random"}, ("Random", "Rng", "Shuffle")


def _cached(
    record: ChangeRecord, dataset: tf.data.Dataset, *, cache_bytes: int, budget_s: float
) -> Change:
    """Add a cache to the end of a pipeline and fill it, if that does not change the examples."""
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
    second = [_arrays(element) for element in dataset.take(len(first))]
    leaves = zip(itertools.chain(*first), itertools.chain(*second), strict=False)
    is_same = all(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in leaves)
    if not len(first) == len(second) > 0 or not is_same:
        return _untried(record, Note.of("cache_freezes"))
    cached, end_s = dataset.cache(), time.perf_counter() + budget_s
    is_full, size_bytes = _fill(cached, end_s=end_s, most_bytes=cache_bytes)
    if size_bytes > cache_bytes:
        return _untried(record, Note.of("cache_too_large", most=memory_text(cache_bytes)))
    if not is_full:
        return _untried(record, Note.of("cache_not_full", seconds=budget_s))
    condition = Note.of("cache_takes", size=memory_text(size_bytes))
    return dataclasses.replace(record, condition=condition), cached


def _fill(
    cache: tf.data.Dataset, *, end_s: float, most_bytes: float = math.inf
) -> tuple[bool, int]:
    """Read a cache until time or memory is spent. Return whether it is full, and its bytes."""
    size_bytes = epoch = 0
    with contextlib.closing(epochs_of(cache)) as elements:
        for epoch, element in elements:
            if epoch > 0 or size_bytes > most_bytes or time.perf_counter() > end_s:
                break
            if math.isfinite(most_bytes):
                for leaf in _arrays(element):
                    is_text = leaf.dtype == object
                    size_bytes += sum(map(len, leaf.ravel())) if is_text else leaf.nbytes
    return epoch > 0, size_bytes


def fill_cache(source: tf.data.Dataset, budget_s: float) -> str | None:
    """Fill the caches that the pipeline has. Return the reason if one of them is not full."""
    stages, end_s = all_stages(source), time.perf_counter() + budget_s
    if any(has_operation(stage, "CacheDataset") for stage in stages):
        return "`cache` is inside a function of `interleave` or `flat_map`"
    try:
        caches = [stage for stage in stages if kind_of(stage) == "Cache"]
        if not all(_fill(cache, end_s=end_s)[0] for cache in caches):
            return f"{budget_s:.2g} s were not enough"
    except InputError as error:  # A later stage may drop the elements that raise.
        return f"the data before it raised an error: {one_line(str(error))}"
    return None


def _arrays(element: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(element, expand_composites=True)]


def worker_changes(dataset: keras.utils.PyDataset) -> list[Change]:
    """Find the settings of a `PyDataset` to try: more workers."""
    workers = max(2, usable_cores())
    record = ChangeRecord("more_workers", f"workers={workers}", Note.of("rows_by_threads"))
    if dataset.workers >= workers:
        return [_untried(record, Note.of("worker_per_core"))]
    return [(record, read_by_workers(dataset, workers))]


def chain_of(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline, from the last one back to its start or to a branch."""
    stages: list[Any] = [dataset]
    while len(inputs := inputs_of_dataset(stages[-1])) == 1:
        stages += inputs
    return stages


def all_stages(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of all branches of a pipeline, from the last one back to the sources."""
    stages: list[Any] = []
    queue: list[Any] = [dataset]
    while queue:
        stage = queue.pop(0)
        if all(stage is not listed for listed in stages):
            stages.append(stage)
            queue += inputs_of_dataset(stage)
    return stages


def kind_of(stage: Any) -> str:
    """Name the kind of a stage, such as `"Map"`."""
    return type(stage).__name__.removeprefix("_").removesuffix("Dataset")


def is_stateless(stage: Any) -> bool:
    """Return whether the function of a map has no state, no random numbers and no Python code."""
    operations = dataset_graph(stage).get_operations()
    return not any(operation.op_def.is_stateful for operation in operations)


def has_operation(stage: Any, *words: str) -> bool:
    """Return whether the function of a stage has an operation whose name contains a word."""
    function_graph = dataset_graph(stage)
    if function_graph is None:
        return False
    graph = function_graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return any(word in node.op for node in nodes for word in words)


def with_parallel_maps(dataset: tf.data.Dataset) -> tuple[Any, list[Any]]:
    """Return a pipeline whose last maps make parallel calls, and a list of these maps."""
    # The order of a shuffle with a seed may change.
    stages = chain_of(dataset)
    known = next((i for i, s in enumerate(stages) if kind_of(s) not in _REBUILD), len(stages))
    maps = [i for i, stage in enumerate(stages[:known]) if kind_of(stage) == "Map"]
    if not maps:
        return dataset, []
    changed = stages[maps[-1] + 1]
    for stage in reversed(stages[: maps[-1] + 1]):
        changed = _REBUILD[kind_of(stage)](changed, stage)
    return changed, [stages[i] for i in reversed(maps)]


def _remainder(stage: Any) -> dict[str, bool]:
    return {"drop_remainder": bool(dataset_argument(stage, "drop_remainder"))}


# By the kind of a stage `s`: apply the same stage to another dataset `d`.
_REBUILD: dict[str, Callable[[Any, Any], Any]] = {
    "Map": lambda d, s: d.map(
        function_of(s), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ),
    "Batch": lambda d, s: d.batch(dataset_argument(s, "batch_size"), **_remainder(s)),
    "PaddedBatch": lambda d, s: d.padded_batch(
        dataset_argument(s, "batch_size"),
        dataset_argument(s, "padded_shapes"),
        dataset_argument(s, "padding_values"),
        **_remainder(s),
    ),
    "Prefetch": lambda d, s: d.prefetch(int(dataset_argument(s, "buffer_size"))),
    "Shuffle": lambda d, s: d.shuffle(
        dataset_argument(s, "buffer_size"),
        reshuffle_each_iteration=dataset_argument(s, "reshuffle_each_iteration"),
    ),
    "Repeat": lambda d, s: d.repeat(dataset_argument(s, "count")),
    "Options": lambda d, s: d.with_options(s.options()),
}
