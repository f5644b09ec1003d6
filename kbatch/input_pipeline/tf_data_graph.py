"""The stages of a `tf.data` pipeline: found by walking it, and the last ones put together again.

TensorFlow has no public way to look into a pipeline. What is not known here is left alone.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kbatch.library_internals import dataset_argument as given
from kbatch.library_internals import dataset_function as function_of
from kbatch.library_internals import dataset_graph, inputs_of_dataset, only_input_of_dataset


def chain_of(dataset: tf.data.Dataset) -> list[Any]:
    """List the stages of a pipeline from its end down to where it branches or starts."""
    stages: list[Any] = [dataset]
    while (below := only_input_of_dataset(stages[-1])) is not None:
        restructured = kind_of(below) == "Restructured"
        stages.append(
            only_input_of_dataset(only_input_of_dataset(below)) if restructured else below
        )
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
    graph: Any = dataset_graph(stage)
    return not any(operation.op_def.is_stateful for operation in graph.get_operations())


def has_operation(stage: Any, *words: str) -> bool:
    """Return whether the traced function of a stage runs an operation with one of the words."""
    traced = dataset_graph(stage)
    if traced is None:
        return False
    graph = traced.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return any(word in node.op for node in nodes for word in words)


def with_parallel_maps(dataset: tf.data.Dataset) -> tuple[Any, list[Any]]:
    """Let the maps at the end of a pipeline make several calls at once; return them too."""
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
    return {"drop_remainder": bool(given(stage, "drop_remainder"))}


_AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    "Map": lambda d, s: d.map(
        function_of(s), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ),
    "Batch": lambda d, s: d.batch(given(s, "batch_size"), **_cut(s)),
    "PaddedBatch": lambda d, s: d.padded_batch(
        given(s, "batch_size"), given(s, "padded_shapes"), given(s, "padding_values"), **_cut(s)
    ),
    "Prefetch": lambda d, s: d.prefetch(int(given(s, "buffer_size"))),
    "Shuffle": lambda d, s: d.shuffle(
        given(s, "buffer_size"), reshuffle_each_iteration=given(s, "reshuffle_each_iteration")
    ),
    "Repeat": lambda d, s: d.repeat(given(s, "count")),
    "Options": lambda d, s: d.with_options(s.options()),
}
