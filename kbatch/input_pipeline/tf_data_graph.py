"""The stages of a `tf.data` pipeline: found by walking it, and put together again.

TensorFlow has no public way to look into a pipeline. What is not known here is left alone: then
no stage below it can be changed.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kbatch.library_internals import dataset_argument as given
from kbatch.library_internals import dataset_function as function_of
from kbatch.library_internals import dataset_graph, inputs_of_dataset, only_input_of_dataset

Rebuild = Callable[[Any, Any], Any]


class Pipeline:
    """A pipeline taken apart, down to where it branches or starts."""

    def __init__(self, dataset: tf.data.Dataset):
        self.dataset = dataset
        self.stages: list[Any] = [dataset]
        while (below := only_input_of_dataset(self.stages[-1])) is not None:
            self.stages.append(
                only_input_of_dataset(only_input_of_dataset(below))
                if kind_of(below) == "Restructured"
                else below
            )
        self.kinds = [kind_of(stage) for stage in self.stages]

    def rebuilt(
        self, at: int, dataset: tf.data.Dataset, *, parallel: bool = False
    ) -> tf.data.Dataset | None:
        """Put the stages above one of them on another dataset; None where one is not known."""
        # Where a shuffle has a seed, its order may be another.
        ways, at_once = _AGAIN, {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
        if parallel:
            ways = ways | {"Map": lambda d, s: d.map(function_of(s), **at_once)}
        for stage, kind in zip(self.stages[:at][::-1], self.kinds[:at][::-1], strict=True):
            if kind not in ways:
                return None
            dataset = ways[kind](dataset, stage)
        return dataset


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


def _parallel(stage: Any) -> dict[str, Any]:
    deterministic = {"true": True, "false": False}.get(given(stage, "deterministic"))
    calls = given(stage, "num_parallel_calls")
    return {"num_parallel_calls": calls, "deterministic": deterministic}


def _cut(stage: Any) -> dict[str, bool]:
    return {"drop_remainder": bool(given(stage, "drop_remainder"))}


_AGAIN: dict[str, Rebuild] = {
    "Map": lambda d, s: d.map(function_of(s)),
    "ParallelMap": lambda d, s: d.map(function_of(s), **_parallel(s)),
    "Batch": lambda d, s: d.batch(given(s, "batch_size"), **_cut(s)),
    "ParallelBatch": lambda d, s: d.batch(given(s, "batch_size"), **_cut(s), **_parallel(s)),
    "PaddedBatch": lambda d, s: d.padded_batch(
        given(s, "batch_size"), given(s, "padded_shapes"), given(s, "padding_values"), **_cut(s)
    ),
    "Filter": lambda d, s: d.filter(function_of(s)),
    "Rebatch": lambda d, s: d.rebatch(given(s, "batch_sizes"), **_cut(s)),
    "Unbatch": lambda d, s: d.unbatch(),
    "Prefetch": lambda d, s: d.prefetch(int(given(s, "buffer_size"))),
    "Shuffle": lambda d, s: d.shuffle(
        given(s, "buffer_size"), reshuffle_each_iteration=given(s, "reshuffle_each_iteration")
    ),
    "Repeat": lambda d, s: d.repeat(given(s, "count")),
    "Take": lambda d, s: d.take(given(s, "count")),
    "Skip": lambda d, s: d.skip(given(s, "count")),
    "Options": lambda d, s: d.with_options(s.options()),
}
