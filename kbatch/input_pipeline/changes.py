"""Changes to an input pipeline that leave its examples as they are."""

import os
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kbatch.document.numbers import memory_text
from kbatch.document.section import one_line
from kbatch.errors import InputError
from kbatch.input_pipeline.record import UntriedRecord
from kbatch.input_pipeline.tf_data_graph import (
    all_stages,
    draws_random_numbers,
    function_of,
    has_cache_within,
    in_parallel,
    is_stateless,
    kind_of,
    rebuilt,
    stages_of,
)
from kbatch.training.data.batch_source import (
    BatchSource,
    BatchStream,
    first_batch,
    source_of_dataset,
    source_of_py_dataset,
)

_PARALLEL_KINDS = ("ParallelMap", "ParallelInterleave", "ParallelBatch")
_NOT_REBUILT = "a stage above it cannot be put together again from outside"
_THREADS = (
    "the function may be called from several threads at once, and draws random numbers in another "
    "order"
)


class Change(NamedTuple):
    """A changed pipeline.

    Attributes:
        name: The change in a few words.
        code: The line of code that makes it.
        condition: What must hold for it, None if nothing must.
        source: The changed pipeline.
    """

    name: str
    code: str
    condition: str | None
    source: BatchSource


class Changes(NamedTuple):
    """What can be changed from outside, and what cannot.

    Attributes:
        tried: Changes to measure.
        untried: Changes that cannot be made from outside, and why.
    """

    tried: tuple[Change, ...]
    untried: tuple[UntriedRecord, ...]


def pipeline_changes(dataset: tf.data.Dataset) -> Changes:
    """Find the changes that can be made to a pipeline from outside.

    Caching is apart, in `cached_pipeline`: it takes a pass over the data.
    """
    rules = (_prefetch, _parallel_map, _thread_pool, _any_order, _vectorised_map)
    found = [_made(rule, dataset) for rule in rules]
    return Changes(
        tuple(change for change in found if isinstance(change, Change)),
        tuple(change for change in found if isinstance(change, UntriedRecord)),
    )


def _made(rule: Any, dataset: tf.data.Dataset) -> Change | UntriedRecord | None:
    """Follow a rule; an error in putting a pipeline together is a reason not to try it."""
    try:
        return rule(dataset, stages_of(dataset))
    except Exception as error:  # A function of the user's is traced again, and may raise anything.
        name = rule.__name__.strip("_").replace("_", " ")
        return UntriedRecord(name, "", f"failed: {one_line(str(error)) or type(error).__name__}")


def _prefetch(dataset: tf.data.Dataset, stages: list[Any]) -> Change | UntriedRecord:
    name, code = "prefetch", "dataset = dataset.prefetch(tf.data.AUTOTUNE)"
    kinds = [kind_of(stage) for stage in stages if kind_of(stage) != "Options"]
    if kinds[0] == "Prefetch":
        return UntriedRecord(name, code, "the pipeline ends with a prefetch already")
    return Change(name, code, None, source_of_dataset(dataset.prefetch(tf.data.AUTOTUNE)))


def _parallel_map(dataset: tf.data.Dataset, stages: list[Any]) -> Change | UntriedRecord:
    maps = [i for i, stage in enumerate(stages) if kind_of(stage) == "Map"]
    name = "parallel map"
    if not maps:
        reason = "no map that makes one call at a time was found in the pipeline"
        return UntriedRecord(name, _parallel_code(["function"]), reason)
    code = _parallel_code([_function_name(stages[i]) for i in reversed(maps)])
    # Below a stage that cannot be put together again, such as a cache, maps stay as they are.
    while maps:
        below = stages[maps[-1] + 1]
        changed = rebuilt(stages, maps[-1] + 1, below, changed={"Map": in_parallel})
        if changed is not None:
            code = _parallel_code([_function_name(stages[i]) for i in reversed(maps)])
            stateful = not all(is_stateless(stages[i]) for i in maps)
            return Change(name, code, _THREADS if stateful else None, source_of_dataset(changed))
        del maps[-1]
    return UntriedRecord(name, code, _NOT_REBUILT)


def _parallel_code(functions: list[str]) -> str:
    return "; ".join(f".map({f}, num_parallel_calls=tf.data.AUTOTUNE)" for f in functions)


def _thread_pool(dataset: tf.data.Dataset, stages: list[Any]) -> Change | UntriedRecord:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = "private thread pool"
    code = (
        f"options = tf.data.Options(); options.threading.private_threadpool_size = {cores}; "
        "dataset = dataset.with_options(options)"
    )
    if dataset.options().threading.private_threadpool_size:
        return UntriedRecord(name, code, "the pipeline has one already")
    options = tf.data.Options()
    options.threading.private_threadpool_size = cores
    return Change(name, code, None, source_of_dataset(dataset.with_options(options)))


def _any_order(dataset: tf.data.Dataset, stages: list[Any]) -> Change | UntriedRecord:
    name, code = (
        "any order",
        "options = tf.data.Options(); options.deterministic = False; "
        "dataset = dataset.with_options(options)",
    )
    if dataset.options().deterministic is False:
        return UntriedRecord(name, code, "the pipeline has given up its order already")
    if not any(kind_of(stage) in _PARALLEL_KINDS for stage in stages):
        return UntriedRecord(name, code, "no parallel stage whose order it would free was found")
    options = tf.data.Options()
    options.deterministic = False
    condition = "the examples may then come in another order each time, whatever the seed"
    return Change(name, code, condition, source_of_dataset(dataset.with_options(options)))


def _vectorised_map(dataset: tf.data.Dataset, stages: list[Any]) -> UntriedRecord | None:
    kinds = [kind_of(stage) for stage in stages]
    batches = [i for i, kind in enumerate(kinds) if kind in ("Batch", "ParallelBatch")]
    maps = [i for i, kind in enumerate(kinds) if kind in ("Map", "ParallelMap")]
    if not batches or not maps or maps[-1] < batches[0]:
        return None
    function = _function_name(stages[maps[-1]])
    return UntriedRecord(
        "batch before a vectorised map",
        f".batch(batch_size).map({function})",
        f"{function} must then take whole batches, and only you can write it so",
    )


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


def cached_pipeline(
    dataset: tf.data.Dataset, *, budget_bytes: int, budget_s: float
) -> Change | UntriedRecord:
    """Cache as much of a pipeline as gives the same elements in every pass.

    That is what lies below the lowest shuffle or repeat; two passes over its first elements must
    agree, else a map draws random numbers. One pass over all of it fills the cache, unless it takes
    more memory or time on the way than there is.
    """
    stages = stages_of(dataset)
    kinds = [kind_of(stage) for stage in stages]
    everything = all_stages(dataset)
    if any(kind_of(stage) == "Cache" or has_cache_within(stage) for stage in everything):
        return _untried("the pipeline has a cache already")
    at = max((i + 1 for i, kind in enumerate(kinds) if kind in _OPEN_ENDED), default=0)
    if all(kind in _IN_MEMORY for kind in kinds[at:]):
        above = "the shuffle or repeat stands below every map: place `.map(...).cache()` before it"
        return _untried(above if at else "the pipeline does nothing that a cache would save")
    if stages[at].cardinality() == tf.data.INFINITE_CARDINALITY:
        return _untried("the data have no end")
    if any(map(draws_random_numbers, stages[at:])):
        return _untried(
            "a map draws random numbers, which would be frozen. Place it by hand before that map"
        )
    try:
        return _cached(stages, at, budget_bytes=budget_bytes, budget_s=budget_s)
    except (tf.errors.OpError, InputError) as error:
        return _untried(f"the data raised an error while it was filled: {one_line(str(error))}")


def fill_cache(source: BatchSource, budget_s: float) -> tuple[str, ...]:
    """Make the pass that fills the pipeline's own cache in memory, and describe what that means."""
    if source.kind != "tf.data.Dataset":
        return ()
    stages = all_stages(source.given)
    within = any(has_cache_within(stage) for stage in stages)
    inside = (_INSIDE,) if within else ()
    # Those below another cache are filled with it.
    caches = [stage for stage in stages if kind_of(stage) == "Cache"]
    if not caches:
        return inside
    end_s = time.perf_counter() + budget_s
    try:
        full = all(_filled(cache, end_s=end_s).full for cache in caches)
    except InputError as error:  # A stage above may leave broken elements out.
        return (
            *inside,
            "The pipeline's cache was not filled first, since the data below it raised an error: "
            f"{one_line(str(error))}",
        )
    if not full:
        return (
            *inside,
            f"The pipeline's cache was not full after {budget_s:.2g} s: the rates are those of the "
            "first epoch, which fills it. Later epochs may be faster.",
        )
    return (
        *inside,
        "The pipeline has a cache, and a pass over the data filled it first: the rates are those "
        "of the epochs after the first one.",
    )


class _Filling(NamedTuple):
    """Whether a cache was read to its end, and the bytes of its elements so far."""

    full: bool
    size_bytes: int


def _filled(cache: tf.data.Dataset, *, end_s: float, budget_bytes: int | None = None) -> _Filling:
    """Read a cache to its end, unless time or memory is spent before."""
    size_bytes = 0
    with BatchStream(source_of_dataset(cache), read_before=True) as stream:
        while True:
            element = stream.next()
            if stream.epochs > 0:
                return _Filling(True, size_bytes)
            if budget_bytes is not None:
                size_bytes += _bytes(_arrays(element))
            over = budget_bytes is not None and size_bytes > budget_bytes
            if over or time.perf_counter() > end_s:
                return _Filling(False, size_bytes)


def _cached(
    stages: list[Any], at: int, *, budget_bytes: int, budget_s: float
) -> Change | UntriedRecord:
    part = stages[at]
    seen, elements = _sample(part, budget_s / 4), max(0, int(part.cardinality()))
    if not seen.same:
        return _untried(
            "two passes gave different elements: what is random would be frozen. Place it by hand "
            "before what is random"
        )
    needed_bytes, needed_s = round(elements * seen.element_bytes), elements * seen.element_s
    more = f"more than the {memory_text(budget_bytes)} of `cache_bytes`"
    if needed_bytes > budget_bytes:
        return _untried(f"it would take {memory_text(needed_bytes)}, {more}")
    if needed_s > budget_s:
        return _untried(
            f"filling it would take about {needed_s:.0f} s: give a larger `budget_s` to try it"
        )
    cached = part.cache()
    changed = rebuilt(stages, at, cached)
    if changed is None:
        return _untried("a stage above it cannot be put together again from outside")
    filling = _filled(cached, end_s=time.perf_counter() + budget_s, budget_bytes=budget_bytes)
    if filling.size_bytes > budget_bytes:
        return _untried(f"it takes {more}")
    if not filling.full:
        return _untried(
            f"it was not full after {budget_s:.2g} s: give a larger `budget_s` to try it"
        )
    place = f"before .{kind_of(stages[at - 1]).lower()}(...)" if at else "as the last stage"
    return Change(
        _NAME,
        f"{_CODE}  # {place}",
        f"it takes {memory_text(filling.size_bytes)} of memory, and the first epoch is as slow as "
        "before",
        source_of_dataset(changed),
    )


class _Sample(NamedTuple):
    """The first elements of two passes: whether they agree, and what one of them takes."""

    same: bool
    element_bytes: float
    element_s: float


def _sample(part: tf.data.Dataset, budget_s: float) -> _Sample:
    first, arrivals_s = _first_elements(part, _COMPARED, budget_s)
    again, _ = _first_elements(part, len(first), budget_s)
    same = len(first) == len(again) > 0 and all(map(_equal, first, again))
    # The first one takes the start of the pipeline too.
    taken_s = arrivals_s[-1] - arrivals_s[0] if len(first) > 1 else sum(arrivals_s)
    element_s = taken_s / max(1, len(first) - 1)
    return _Sample(same, float(np.mean([_bytes(e) for e in first] or [0])), element_s)


def _first_elements(
    part: tf.data.Dataset, most: int, budget_s: float
) -> tuple[list[list[Any]], list[float]]:
    began_s, found, arrivals_s = time.perf_counter(), [], []
    for element in part.take(most):
        found.append(_arrays(element))
        arrivals_s.append(time.perf_counter() - began_s)
        if arrivals_s[-1] > budget_s:
            break
    return found, arrivals_s


def _arrays(element: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(element, expand_composites=True)]


def _equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        for a, b in zip(one, other, strict=True)
    )


def _bytes(element: list[Any]) -> int:
    return sum(
        sum(map(len, leaf.ravel())) if leaf.dtype == object else leaf.nbytes for leaf in element
    )


def _untried(reason: str) -> UntriedRecord:
    return UntriedRecord(_NAME, _CODE, reason)


_SEVERAL_THREADS = "`__getitem__` may be called from several threads at once"
_PROCESSES = "each process has its own copy of the data"
_FEWEST_WORKERS = 2
_LONGER = 4


def worker_changes(dataset: Any, *, timeout_s: float | None) -> Changes:
    """Find the settings of a PyDataset to try: threads, processes and a longer queue."""
    found = [_more_workers(dataset), _processes(dataset, timeout_s), _longer_queue(dataset)]
    return Changes(
        tuple(change for change in found if isinstance(change, Change)),
        tuple(change for change in found if isinstance(change, UntriedRecord)),
    )


def _more_workers(dataset: Any) -> Change | UntriedRecord:
    workers = _workers(dataset)
    name, code = "more workers", f"workers={workers}"
    if dataset.workers >= workers:
        return UntriedRecord(name, code, "there is one a core already")
    return Change(name, code, _SEVERAL_THREADS, _source(dataset, workers=workers))


def _processes(dataset: Any, timeout_s: float | None) -> Change | UntriedRecord:
    workers = _workers(dataset)
    name, code = "processes", f"workers={workers}, use_multiprocessing=True"
    if dataset.use_multiprocessing:
        return UntriedRecord(name, code, "the workers are processes already")
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    source = _source(dataset, workers=workers, use_multiprocessing=True, **limit)
    problem = None if timeout_s is None else _problem(source)
    if problem:
        return UntriedRecord(name, code, problem)
    return Change(name, code, _PROCESSES, source)


def _longer_queue(dataset: Any) -> Change | UntriedRecord:
    longer = _LONGER * dataset.max_queue_size
    name, code = "longer queue", f"max_queue_size={longer}"
    if dataset.workers < 2 and not dataset.use_multiprocessing:
        return UntriedRecord(name, code, "a single worker in the main thread has no queue")
    return Change(name, code, None, _source(dataset, max_queue_size=longer))


def _workers(dataset: Any) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(_FEWEST_WORKERS, cores or 1, dataset.workers)


def _source(dataset: Any, **changed: Any):
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return source_of_py_dataset(dataset, **{n: getattr(dataset, n) for n in names} | changed)


def _problem(source: Any) -> str | None:
    """Try processes once: forked beside TensorFlow's threads, they may never answer."""
    try:
        first_batch(source)
    except InputError as error:
        return f"processes failed: {error}"
    return None
