"""The largest batch, and what happens beyond it."""

import gc
import math

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def conv_net(side, filters, depth, *, jit_compile):
    """A net of equal convolutions: a row takes its input and some copies of `depth` maps."""
    import keras

    layers = keras.layers
    maps = [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(depth)]
    model = keras.Sequential(
        [layers.Input((side, side, 1)), *maps, layers.GlobalAveragePooling2D(), layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


def rows(count, side):
    rng = np.random.default_rng(0)
    return rng.random((count, side, side, 1), dtype="float32"), np.zeros((count, 1), "float32")


def started():
    """Whether this process has TensorFlow's devices."""
    from tensorflow.python.eager import context

    return context.context()._initialized


@pytest.mark.parametrize("memory", ["all", "a limit, XLA"])
def test_the_largest_batch_is_found_in_a_worker(scale, memory, record_property):
    import kbatch

    side, filters = (64, 64) if scale.on_gpu else (16, 8)
    # XLA compiles each size that is tried. A map of all rows is smaller than 2**31 numbers.
    depth = 3 if memory != "all" else 32 if scale.on_gpu else 8
    limit_bytes = scale.more_bytes if memory != "all" or not scale.on_gpu else None
    # More rows than fit: each takes at least two copies of its maps.
    most_bytes = limit_bytes or 200 * 2**30
    count = math.ceil(most_bytes / (2 * 4 * side**2 * filters * depth))

    def build():
        return conv_net(side, filters, depth, jit_compile=memory != "all")

    x, y = rows(count, side)
    found = kbatch.find_max_batch_size(build, x, y, memory_limit_bytes=limit_bytes)
    record_property("largest batch", found.max_batch_size)
    record_property("of the limit", f"{found.peak_memory_bytes / found.limit_bytes:.3f}")
    record_property("limit", f"{found.limit_bytes / 2**30:.2f} GiB")
    record_property("probes", ", ".join(f"{p.batch_size} {p.outcome}" for p in found.probes))
    assert found.device == ("GPU:0" if scale.on_gpu else "CPU:0")
    assert not started()
    # Memory may jump over the window from one size to the next.
    beyond = min((p.batch_size for p in found.probes if p.outcome != "fits"), default=math.inf)
    assert found.reason.code == "in_window" or beyond <= 1.05 * found.max_batch_size, found.reason
    assert {"search", "fresh_process"} <= {probe.purpose for probe in found.probes}
    assert limit_bytes is None or found.limit_bytes == limit_bytes
    assert not [note for note in found.notes if "this process" in note]


@pytest.mark.parametrize(
    ("memory", "jit_compile"), [("limited", False), ("limited", True), ("all", False)]
)
def test_a_convolution_runs_out_and_the_next_size_trains(
    scale, memory, jit_compile, record_property
):
    import tensorflow as tf

    from kbatch.device.failures import device_is_lost, ran_out_of_memory
    from kbatch.device.memory import DeviceMemory, limit_gpu
    from kbatch.library_internals import fail_at_once_without_memory

    fail_at_once_without_memory()
    if memory == "limited":
        limit_gpu(scale.limit_bytes)
    if not scale.on_gpu and (memory == "all" or jit_compile):
        pytest.skip("a CPU's process ends where XLA, or its plain allocator, runs out of memory")
    side, filters = (64, 64) if memory == "all" else (32, scale.width)
    device = DeviceMemory()
    limit_bytes = device.limit_bytes or scale.limit_bytes
    # A map is smaller than 2**31 numbers, which not every kernel can count.
    size = min(4096, 2 * limit_bytes // (4 * 4 * side**2 * filters))
    depth = max(4, math.ceil(2 * limit_bytes / (4 * size * side**2 * filters)))
    model = conv_net(side, filters, depth, jit_compile=jit_compile)
    x, y = rows(size, side)
    assert np.isfinite(model.train_on_batch(x[:2], y[:2]))
    weights = model.get_weights()
    tried = []
    while size >= 2:
        device.reset()
        try:
            loss = model.train_on_batch(x[:size], y[:size])
        except tf.errors.OpError as error:
            tried.append(f"{size}: {type(error).__name__}")
            if len(tried) == 1:
                record_property("error", " ".join(str(error).split())[:200])
            assert ran_out_of_memory(error, smaller_worked=True)
            assert not device_is_lost(error)
            # Its frames hold the tensors of the step.
            error.__traceback__ = None
            del error
            gc.collect()
            # On a CPU XLA frees the weights that it was to update: here they must stay.
            assert device.held_bytes >= sum(weight.nbytes for weight in weights)
            left = model.get_weights()
            assert all(np.isfinite(weight).all() for weight in left)
            # The first ends in its forward pass. A smaller one may end between two updates.
            assert len(tried) > 1 or all(map(np.array_equal, weights, left))
            size //= 2
            continue
        tried.append(f"{size}: fits")
        break
    record_property("sizes", ", ".join(tried))
    record_property("peak of the limit", f"{device.peak_bytes / limit_bytes:.3f}")
    assert len(tried) >= 2
    assert tried[-1].endswith("fits")
    assert np.isfinite(loss)
    # It is not by far the largest that fits: what the error left behind does not count.
    assert device.peak_bytes > 0.2 * limit_bytes
    assert np.isfinite(model.train_on_batch(x[:size], y[:size]))
