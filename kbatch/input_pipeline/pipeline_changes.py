"""Changes to a `tf.data` pipeline that leave its examples as they are."""

import os
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.document.one_line import one_line
from kbatch.input_pipeline.input_rates import UntriedRecord
from kbatch.input_pipeline.tf_data_graph import (
    function_of,
    in_parallel,
    is_stateless,
    kind_of,
    rebuilt,
    stages_of,
)
from kbatch.training.data.batch_source import BatchSource, source_of_dataset

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
    """Finds the changes that can be made to a pipeline from outside.

    Caching is apart, in `cached_pipeline`: it takes a pass over the data.
    """
    rules = (_prefetch, _parallel_map, _thread_pool, _any_order, _vectorised_map)
    found = [_made(rule, dataset) for rule in rules]
    return Changes(
        tuple(change for change in found if isinstance(change, Change)),
        tuple(change for change in found if isinstance(change, UntriedRecord)),
    )


def _made(rule: Any, dataset: tf.data.Dataset) -> Change | UntriedRecord | None:
    """Follows a rule; an error in putting a pipeline together is a reason not to try it."""
    try:
        return rule(dataset, stages_of(dataset))
    except Exception as error:  # A function of the user's is traced anew, and may raise anything.
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
