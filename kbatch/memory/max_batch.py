"""The largest batch that fits in memory, found by running it."""

import functools
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_size
from kbatch.device.device_memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.memory.max_batch_probing import probe_max_batch
from kbatch.memory.max_batch_record import MaxBatchSizeResult
from kbatch.memory.max_batch_search import check_window
from kbatch.memory.probe_places import search_in_place
from kbatch.memory.workload import Load
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.data import FitData, is_dataset
from kbatch.training.data.sample_rows import example_rows, sample_of


def find_max_batch_size(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    memory_window: tuple[float, float] = (0.80, 0.90),
    memory_limit_bytes: int | None = None,
    max_batch_size: int | None = None,
    training: bool = True,
    longest_example: Any = None,
) -> MaxBatchSizeResult:
    """Finds the largest batch whose memory lies in a window below the limit.

    Real train steps are run in a worker process, five at each size, and TensorFlow's allocator
    tells their peak. The size that is returned was run, once more in a fresh process and after
    other sizes. On a CPU the worker's allocator gets the limit, and runs out as a GPU's does.

    Example:

    >>> found = kbatch.find_max_batch_size(build, x, y, memory_limit_bytes=2 * 2**30)
    >>> found.max_batch_size, found.powers_of_two(16)

    Args:
        build: A function that returns a compiled model, without argument or with keras-tuner's
            `hp` (its defaults are taken), a `HyperModel`, or a compiled model, which stays as it
            is.
        x: Inputs: arrays of shape (examples, ...), a `tf.data.Dataset`, batched or not, or a
            function `batch_size -> tf.data.Dataset`.
        y: Targets of arrays.
        memory_window: Lower and upper share of the limit that is aimed at.
        memory_limit_bytes: Memory that may be taken. None for what TensorFlow has of the GPU, on a
            CPU half of what the host and its control group leave.
        max_batch_size: Largest size to try, None for that of the data set.
        training: Whether to run train steps, or predictions.
        longest_example: One example, (x, y) or x alone, without a batch axis, to use instead of
            rows of the data, where examples differ in length.

    Returns:
        The size, all probes and the fitted line.

    Raises:
        InputError: If the data cannot be batched, have fewer than two examples, or the limit is
            below the weights.
        OutOfMemoryError: If one example does not fit; it names the bytes needed and the limit.
        TypeError: If `build` cannot build, or a bound is no integer.
        ValueError: If the window or a bound cannot be used.
    """
    check_window(memory_window)
    cap = None if max_batch_size is None else check_size(max_batch_size, "max_batch_size")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    load = Load(
        model_builder(build),
        data_source(x, y, longest_example),
        keras.config.dtype_policy().name,
        training=training,
    )
    search = functools.partial(probe_max_batch, memory_window=memory_window, max_batch_size=cap)
    return search_in_place(
        load, search, memory_limit_bytes=limit_bytes, memory_window=memory_window
    )


def data_source(x: Any, y: Any, longest_example: Any = None) -> Any:
    """Gives what probes take their rows of: data, a function of them, or one example.

    Raises:
        InputError: If the data cannot be batched.
    """
    if longest_example is not None:
        # As in Keras, a tuple is (x, y).
        parts = longest_example if isinstance(longest_example, tuple) else (longest_example,)
        return example_rows(parts)
    if callable(x) and not is_dataset(x):
        if y is not None:
            raise InputError(
                "A data function brings its own targets, as (x, y): leave out `y`. "
                f"Received: y of type {type(y).__name__}."
            )
        return x
    return sample_of(FitData(x, y))
