"""The stages of a `tf.data` pipeline: found by walking it, and put together again.

TensorFlow has no public way to look into a pipeline. What is not known here is left alone: then
no stage below it can be changed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

Rebuild = Callable[[Any, Any], Any]


def stages_of(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline, the last one first, down to where it branches or starts.

    What `rebatch` and `unbatch` put before themselves, a map of TensorFlow's own, is left out.
    """
    stages: list[Any] = [dataset]
    while (below := _below(stages[-1])) is not None:
        if kind_of(below) == "Restructured":
            below = _below(_below(below))
        stages.append(below)
    return stages


def all_stages(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline, those of all branches too, each above those below it."""
    found: list[Any] = []
    waiting: list[Any] = [dataset]
    while waiting:
        stage = waiting.pop(0)
        if all(stage is not one for one in found):
            found.append(stage)
            waiting += stage._inputs()
    return found


def has_cache_within(stage: Any) -> bool:
    """Return whether the function of a stage, such as an interleave, make a cache."""
    function = getattr(getattr(stage, "_map_func", None), "function", None)
    return function is not None and any("CacheDataset" in k for k in _operations(function.graph))


def kind_of(stage: Any) -> str:
    """Name the kind of a stage, such as `"Map"`."""
    return type(stage).__name__.removeprefix("_").removesuffix("Dataset")


def function_of(stage: Any) -> Any:
    """Return the function of a map as the person wrote it, None if it has none."""
    return getattr(getattr(stage, "_map_func", None), "_func", None)


def is_stateless(stage: Any) -> bool:
    """Return whether the function of a map has no state: no random numbers, no Python code."""
    graph = stage._map_func.function.graph
    return not any(operation.op_def.is_stateful for operation in graph.get_operations())


def draws_random_numbers(stage: Any) -> bool:
    """Return whether a stage's function has an operation that draws random numbers.

    What Python code in it draws cannot be seen.
    """
    function = getattr(getattr(stage, "_map_func", None), "function", None)
    if function is None:
        return False
    return any("Random" in kind or "Rng" in kind for kind in _operations(function.graph))


def _operations(graph: Any) -> set[str]:
    """List the kinds of operations of a graph, those of the functions in it too."""
    nodes = list(graph.as_graph_def().node)
    nodes += [node for f in graph.as_graph_def().library.function for node in f.node_def]
    return {node.op for node in nodes}


def rebuilt(
    stages: list[Any],
    at: int,
    dataset: tf.data.Dataset,
    *,
    changed: Mapping[str, Rebuild] | None = None,
) -> tf.data.Dataset | None:
    """Put the stages above one of them on another dataset.

    They do the same work; where a shuffle has a seed, its order may be another.
    """
    ways = _AGAIN | dict(changed or {})
    for stage in reversed(stages[:at]):
        again = ways.get(kind_of(stage))
        if again is None:
            return None
        dataset = again(dataset, stage)
    return dataset


def in_parallel(dataset: tf.data.Dataset, stage: Any) -> tf.data.Dataset:
    """Make a map with as many parallel calls as tf.data thinks best, in the same order."""
    return dataset.map(function_of(stage), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _below(stage: Any) -> Any:
    below = getattr(stage, "_input_dataset", None)
    return below if isinstance(below, tf.data.Dataset) else None


def _parallel_map(dataset: tf.data.Dataset, stage: Any) -> tf.data.Dataset:
    deterministic = {"true": True, "false": False}.get(stage._deterministic)
    return dataset.map(
        function_of(stage),
        num_parallel_calls=stage._num_parallel_calls,
        deterministic=deterministic,
    )


def _parallel_batch(dataset: tf.data.Dataset, stage: Any) -> tf.data.Dataset:
    return dataset.batch(
        stage._batch_size,
        drop_remainder=_flag(stage._drop_remainder),
        num_parallel_calls=stage._num_parallel_calls,
        deterministic={"true": True, "false": False}.get(stage._deterministic),
    )


def _flag(tensor: Any) -> bool:
    return bool(tensor)


_AGAIN: dict[str, Rebuild] = {
    "Map": lambda d, s: d.map(function_of(s)),
    "ParallelMap": _parallel_map,
    "Batch": lambda d, s: d.batch(s._batch_size, drop_remainder=_flag(s._drop_remainder)),
    "ParallelBatch": _parallel_batch,
    "PaddedBatch": lambda d, s: d.padded_batch(
        s._batch_size,
        padded_shapes=s._padded_shapes,
        padding_values=s._padding_values,
        drop_remainder=_flag(s._drop_remainder),
    ),
    "Filter": lambda d, s: d.filter(s._predicate._func),
    "Rebatch": lambda d, s: d.rebatch(s._batch_sizes, drop_remainder=_flag(s._drop_remainder)),
    "Unbatch": lambda d, s: d.unbatch(),
    "Prefetch": lambda d, s: d.prefetch(int(s._buffer_size)),
    "Shuffle": lambda d, s: d.shuffle(
        s._buffer_size, reshuffle_each_iteration=s._reshuffle_each_iteration
    ),
    "Repeat": lambda d, s: d.repeat(s._count),
    "Take": lambda d, s: d.take(s._count),
    "Skip": lambda d, s: d.skip(s._count),
    "Options": lambda d, s: d.with_options(s.options()),
}
