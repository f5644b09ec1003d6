"""Changes to an input pipeline that leave its examples as they are, tried in training."""

import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kbatch.device.environment import usable_cores
from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    PreparedInput,
    block_length,
    rate_of,
    training_block,
)
from kbatch.input_pipeline.record import InputPipelineProfile, RemedyRecord, UntriedRecord
from kbatch.input_pipeline.tf_data_graph import (
    Pipeline,
    all_stages,
    function_of,
    has_operation,
    is_stateless,
    kind_of,
)
from kbatch.page.numbers import memory_text, one_line, percent
from kbatch.timing.rounds import FEWEST_ROUNDS, interleaved
from kbatch.training.data.batch_source import (
    BatchSource,
    BatchStream,
    first_batch,
    source_of_dataset,
    source_of_py_dataset,
)


class Change(NamedTuple):
    name: str  # As in `RemedyRecord`, and so are code and condition.
    code: str
    condition: str | None = None
    source: Any = None  # The changed `BatchSource`.
    reason: str | None = None  # Why it is not to be tried, None where it is.

    def untried(self, reason: str) -> UntriedRecord:
        """Return the record of a change that was not tried, for its own reason if it has one."""
        return UntriedRecord(self.name, self.code, self.reason or reason)


# Below this share of waiting no change to the pipeline is worth a measurement.
_LITTLE_WAITING = 0.05
# Share of the time in which a cache is filled, the pipeline's own or one that is tried.
FILL_SHARE = 0.3
_PROCESSES_START_S = 10.0


def try_remedies(
    profile: InputPipelineProfile, prepared: PreparedInput, *, cache_bytes: int, budget_s: float
) -> tuple[tuple[RemedyRecord, ...], tuple[UntriedRecord, ...]]:
    """Try the changes where training waits for data, and describe why not where it does not."""
    source, waiting = prepared.source, profile.wait_share or 0.0
    in_vain, end_s = waiting < _LITTLE_WAITING, time.perf_counter() + budget_s
    if source.kind == "PyDataset":
        timeout_s = None if in_vain else max(_PROCESSES_START_S, budget_s)
        changes = worker_changes(source.given, timeout_s=timeout_s)
    else:
        changes = pipeline_changes(source.given)
    if in_vain:
        reason = f"training waits for data {percent(waiting)} of its time: there is little to gain"
        return (), tuple(change.untried(reason) for change in changes)
    if source.kind == "tf.data.Dataset":
        fill_s = budget_s * FILL_SHARE
        changes.append(cached_pipeline(source.given, budget_bytes=cache_bytes, budget_s=fill_s))
    left_s = max(0.0, end_s - time.perf_counter())
    return try_changes(changes, prepared, even=profile.is_even, budget_s=left_s)


# Batches that a block takes at least after the first: one to settle and one that counts.
_LATER_BATCHES = 2
# Changes are tried that might take so much longer than there is time.
_LONGER = 1.5


def try_changes(
    changes: Sequence[Change], prepared: PreparedInput, *, even: bool, budget_s: float
) -> tuple[tuple[RemedyRecord, ...], tuple[UntriedRecord, ...]]:
    """Train on each changed pipeline and on the original, in turn."""
    # Three rounds are made in any case: changes for which there is no time are not tried.
    began_s, reading = time.perf_counter(), prepared.reading
    first_batch_s, block_s = reading.record.first_batch_s, reading.duration_s
    if even:
        read = reading.record.counted
        batch_s = prepared.batch_size * read.duration_s / read.examples
        block_s = first_batch_s + _LATER_BATCHES * (batch_s + prepared.step_s)
    made = [change for change in changes if change.reason is None]
    most = max(0, int(_LONGER * budget_s / (FEWEST_ROUNDS * block_s)) - 1)
    needed_s = FEWEST_ROUNDS * block_s * (len(made) + 1)
    short = f"there was no time: all changes need about {needed_s:.0f} s, half of `budget_s`"
    unmade = [change for change in changes if change.reason is not None]
    left_out = tuple(change.untried(short) for change in (*unmade, *made[most:]))
    given = made[:most]
    if not given:
        return (), left_out
    contenders = len(given) + 1
    length = BlockLength(0.0, reading.duration_s, reading.duration_s, "start")
    if even:
        starts_s = contenders * first_batch_s
        length = reading.counted(
            block_length(budget_s, contenders=contenders, starts_s=starts_s), step_s=prepared.step_s
        )
    failures: dict[str, str] = {}

    def train(name: str, source: BatchSource) -> Block | None:
        if name in failures:
            return None
        try:
            return training_block(source, prepared.step, length)
        except Exception as error:  # Whatever the changed pipeline raises: the others go on.
            if source is prepared.source:
                raise
            failures[name] = _failed(error)
            return None

    sources = {"": prepared.source} | {change.name: change.source for change in given}
    found = interleaved(
        {name: functools.partial(train, name, source) for name, source in sources.items()},
        until_s=began_s + budget_s,
        most_rounds=MOST_ROUNDS,
    )
    rates = {name: rate_of([block for block in blocks if block]) for name, blocks in found.items()}
    tried = tuple(
        RemedyRecord(c.name, c.code, c.condition, rates[""], rates[c.name])
        for c in given
        if c.name not in failures
    )
    failed = (c.untried(failures[c.name]) for c in given if c.name in failures)
    return tried, (*left_out, *failed)


def _failed(error: Exception) -> str:
    return f"failed: {one_line(str(error)) or type(error).__name__}"


_OPTIONS = "options = tf.data.Options(); {}; dataset = dataset.with_options(options)"
_NOT_REBUILT = "a stage above it cannot be put together again from outside"
_THREADS = (
    "the function may be called from several threads at once, and draws random numbers in another "
    "order"
)


def pipeline_changes(dataset: tf.data.Dataset) -> list[Change]:
    """Find the changes to a pipeline that can be made from outside, but for a cache."""
    pipeline, given, cores = Pipeline(dataset), dataset.options(), usable_cores()
    kinds = pipeline.kinds
    threads, unordered = tf.data.Options(), tf.data.Options()
    threads.threading.private_threadpool_size = cores
    unordered.deterministic = False
    ends_with = next(kind for kind in kinds if kind != "Options")
    no_order = None
    if given.deterministic is False:
        no_order = "the pipeline has given up its order already"
    elif not {"ParallelMap", "ParallelInterleave", "ParallelBatch"}.intersection(kinds):
        no_order = "no parallel stage whose order it would free was found"
    found = [
        Change(
            "prefetch",
            "dataset = dataset.prefetch(tf.data.AUTOTUNE)",
            None,
            source_of_dataset(dataset.prefetch(tf.data.AUTOTUNE)),
            "the pipeline ends with a prefetch already" if ends_with == "Prefetch" else None,
        ),
        _parallel_map(pipeline),
        Change(
            "private thread pool",
            _OPTIONS.format(f"options.threading.private_threadpool_size = {cores}"),
            None,
            source_of_dataset(dataset.with_options(threads)),
            "the pipeline has one already" if given.threading.private_threadpool_size else None,
        ),
        Change(
            "any order",
            _OPTIONS.format("options.deterministic = False"),
            "the examples may then come in another order each time, whatever the seed",
            source_of_dataset(dataset.with_options(unordered)),
            no_order,
        ),
    ]
    batches = [i for i, kind in enumerate(kinds) if kind in ("Batch", "ParallelBatch")]
    maps = [i for i, kind in enumerate(kinds) if kind in ("Map", "ParallelMap")]
    if batches and maps and maps[-1] >= batches[0]:
        function = _function_name(pipeline.stages[maps[-1]])
        code = f".batch(batch_size).map({function})"
        reason = f"{function} must then take whole batches, and only you can write it so"
        found.append(Change("batch before a vectorised map", code, reason=reason))
    return found


def _parallel_map(pipeline: Pipeline) -> Change:
    maps = [i for i, kind in enumerate(pipeline.kinds) if kind == "Map"]
    name, code = "parallel map", _parallel_code(pipeline, maps)
    if not maps:
        reason = "no map that makes one call at a time was found in the pipeline"
        return Change(name, code, reason=reason)
    try:
        # Below a stage that cannot be put together again, such as a cache, maps stay as they are.
        for count in range(len(maps), 0, -1):
            above, lowest = maps[:count], maps[count - 1] + 1
            changed = pipeline.rebuilt(lowest, pipeline.stages[lowest], parallel=True)
            if changed is not None:
                stateless = all(is_stateless(pipeline.stages[i]) for i in above)
                code, source = _parallel_code(pipeline, above), source_of_dataset(changed)
                return Change(name, code, None if stateless else _THREADS, source)
    except Exception as error:  # The user's function is traced again, and may raise anything.
        return Change(name, "", reason=_failed(error))
    return Change(name, code, reason=_NOT_REBUILT)


def _parallel_code(pipeline: Pipeline, maps: list[int]) -> str:
    functions = [_function_name(pipeline.stages[i]) for i in reversed(maps)] or ["function"]
    return "; ".join(f".map({f}, num_parallel_calls=tf.data.AUTOTUNE)" for f in functions)


def _function_name(stage: Any) -> str:
    name = getattr(function_of(stage), "__name__", "function")
    return "function" if name == "<lambda>" else name


_NAME, _CODE = "cache in memory", ".cache()"
# Elements of both passes that are compared.
_COMPARED = 8
# Nothing from these on gives the same elements in every pass, or ends.
_OPEN_ENDED = ("Shuffle", "Repeat")
_IN_MEMORY = ("TensorSlice", "Tensor", "Range", "Options")
_INSIDE = (
    "The pipeline has a cache in a function of `interleave` or `flat_map`, which could not be "
    "filled beforehand: the rates may be those of an epoch that fills it."
)


def cached_pipeline(dataset: tf.data.Dataset, *, budget_bytes: int, budget_s: float) -> Change:
    """Cache the part of a pipeline that gives the same elements in every pass, if it fits."""
    try:
        found = _cached(Pipeline(dataset), budget_bytes=budget_bytes, budget_s=budget_s)
    except (tf.errors.OpError, InputError) as error:
        found = f"the data raised an error while it was filled: {one_line(str(error))}"
    return found if isinstance(found, Change) else Change(_NAME, _CODE, reason=found)


def _cached(pipeline: Pipeline, *, budget_bytes: int, budget_s: float) -> Change | str:
    everything = all_stages(pipeline.dataset)
    if any(kind_of(s) == "Cache" or has_operation(s, "CacheDataset") for s in everything):
        return "the pipeline has a cache already"
    at = max((i + 1 for i, kind in enumerate(pipeline.kinds) if kind in _OPEN_ENDED), default=0)
    part = pipeline.stages[at]
    if all(kind in _IN_MEMORY for kind in pipeline.kinds[at:]):
        above = "the shuffle or repeat stands below every map: place `.map(...).cache()` before it"
        return above if at else "the pipeline does nothing that a cache would save"
    if part.cardinality() == tf.data.INFINITE_CARDINALITY:
        return "the data have no end"
    if any(has_operation(stage, "Random", "Rng") for stage in pipeline.stages[at:]):
        return "a map draws random numbers, which would be frozen. Place it by hand before that map"
    first, arrivals_s = _first_elements(part, _COMPARED, budget_s / 4)
    again, _ = _first_elements(part, len(first), budget_s / 4)
    leaves = zip(itertools.chain(*first), itertools.chain(*again), strict=False)
    same = all(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in leaves)
    if not len(first) == len(again) > 0 or not same:
        return (
            "two passes gave different elements: what is random would be frozen. Place it by hand "
            "before what is random"
        )
    # The first one takes the start of the pipeline too.
    taken_s = arrivals_s[-1] - arrivals_s[0] if len(first) > 1 else arrivals_s[0]
    elements = max(0, int(part.cardinality()))
    needed_bytes = round(elements * float(np.mean([_bytes(element) for element in first])))
    needed_s = elements * taken_s / max(1, len(first) - 1)
    more = f"more than the {memory_text(budget_bytes)} of `cache_bytes`"
    if needed_bytes > budget_bytes:
        return f"it would take {memory_text(needed_bytes)}, {more}"
    if needed_s > budget_s:
        return f"filling it would take about {needed_s:.0f} s: give a larger `budget_s` to try it"
    cached = part.cache()
    changed = pipeline.rebuilt(at, cached)
    if changed is None:
        return _NOT_REBUILT
    end_s = time.perf_counter() + budget_s
    full, size_bytes = _filled(cached, end_s=end_s, budget_bytes=budget_bytes)
    if size_bytes > budget_bytes:
        return f"it takes {more}"
    if not full:
        return f"it was not full after {budget_s:.2g} s: give a larger `budget_s` to try it"
    place = f"before .{pipeline.kinds[at - 1].lower()}(...)" if at else "as the last stage"
    return Change(
        _NAME,
        f"{_CODE}  # {place}",
        f"it takes {memory_text(size_bytes)} of memory, and the first epoch is as slow as before",
        source_of_dataset(changed),
    )


def _first_elements(
    part: tf.data.Dataset, most: int, budget_s: float
) -> tuple[list[list[np.ndarray]], list[float]]:
    """Read elements, and the seconds until each arrived."""
    began_s, found, arrivals_s = time.perf_counter(), [], []
    for element in part.take(most):
        found.append(_arrays(element))
        arrivals_s.append(time.perf_counter() - began_s)
        if arrivals_s[-1] > budget_s:
            break
    return found, arrivals_s


def _filled(
    cache: tf.data.Dataset, *, end_s: float, budget_bytes: float = math.inf
) -> tuple[bool, int]:
    """Read a cache until time or memory is spent: whether it is full, and its bytes so far."""
    size_bytes = 0
    with BatchStream(source_of_dataset(cache), read_before=True) as stream:
        while True:
            element = stream.next()
            if stream.epochs > 0:
                return True, size_bytes
            if math.isfinite(budget_bytes):
                size_bytes += _bytes(_arrays(element))
            if size_bytes > budget_bytes or time.perf_counter() > end_s:
                return False, size_bytes


def fill_cache(source: BatchSource, budget_s: float) -> tuple[str, ...]:
    """Make the pass that fills the pipeline's own cache in memory, and describe what that means."""
    if source.kind != "tf.data.Dataset":
        return ()
    stages = all_stages(source.given)
    inside = (_INSIDE,) if any(has_operation(s, "CacheDataset") for s in stages) else ()
    # Those below another cache are filled with it.
    caches = [stage for stage in stages if kind_of(stage) == "Cache"]
    if not caches:
        return inside
    end_s = time.perf_counter() + budget_s
    note = (
        "The pipeline has a cache, and a pass over the data filled it first: the rates are those "
        "of the epochs after the first one."
    )
    try:
        if not all(_filled(cache, end_s=end_s)[0] for cache in caches):
            note = (
                f"The pipeline's cache was not full after {budget_s:.2g} s: the rates are those of "
                "the first epoch, which fills it. Later epochs may be faster."
            )
    except InputError as error:  # A stage above may leave broken elements out.
        note = (
            "The pipeline's cache was not filled first, since the data below it raised an error: "
            f"{one_line(str(error))}"
        )
    return (*inside, note)


def _arrays(element: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(element, expand_composites=True)]


def _bytes(element: list[np.ndarray]) -> int:
    texts = (leaf.ravel() for leaf in element if leaf.dtype == object)
    numbers = (leaf.nbytes for leaf in element if leaf.dtype != object)
    return sum(numbers) + sum(len(text) for leaf in texts for text in leaf)


_FEWEST_WORKERS = 2
_LONGER_QUEUE = 4


def worker_changes(dataset: Any, *, timeout_s: float | None) -> list[Change]:
    """Find the settings of a PyDataset to try: threads, processes and a longer queue."""
    # Processes that were forked beside TensorFlow's threads may never answer: they are waited for
    # once.
    workers = max(_FEWEST_WORKERS, usable_cores(), dataset.workers)
    alone = dataset.workers < 2 and not dataset.use_multiprocessing
    rules: tuple[tuple[str, dict[str, Any], str | None, str | None], ...] = (
        (
            "more workers",
            {"workers": workers},
            "`__getitem__` may be called from several threads at once",
            "there is one a core already" if dataset.workers >= workers else None,
        ),
        (
            "processes",
            {"workers": workers, "use_multiprocessing": True},
            "each process has its own copy of the data",
            "the workers are processes already" if dataset.use_multiprocessing else None,
        ),
        (
            "longer queue",
            {"max_queue_size": _LONGER_QUEUE * dataset.max_queue_size},
            None,
            "a single worker in the main thread has no queue" if alone else None,
        ),
    )
    found: list[Change] = []
    for name, settings, condition, reason in rules:
        tested = name == "processes" and timeout_s is not None
        limit: dict[str, Any] = {"timeout_s": timeout_s} if tested else {}
        source = source_of_py_dataset(dataset, settings, **limit)
        if tested and reason is None:
            try:
                first_batch(source)
            except InputError as error:
                reason = f"processes failed: {error}"
        code = ", ".join(f"{setting}={value}" for setting, value in settings.items())
        found.append(Change(name, code, condition, source, reason))
    return found
