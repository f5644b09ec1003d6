"""Search for the largest batch with real train steps and workers that really run out of memory."""

import math
import tempfile

import keras
import numpy as np
import psutil
import pytest
import small_models as models
import tensorflow as tf
from memory_models import MB, WIDTH, conv_net, images, wide_net

import kbatch
from kbatch.errors import InputError, OutOfMemoryError
from kbatch.memory.find import probe_max_batch
from kbatch.memory.probe import ProcessProbes, WorkerProbes, open_probes
from kbatch.memory.workload import Workload
from kbatch.training.build_function import model_builder
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import dtype_policy_scope

layers = keras.layers


def workers():
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "kbatch.device.worker import main" in " ".join(process.cmdline())
    ]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert list(folder.glob("kbatch-*")) == []
    assert workers() == []


# An allocator with so little memory is fragmented when it is more than half full. Whenever it runs
# out of memory, it waits ten seconds.
WINDOW = (0.4, 0.5)


@pytest.mark.slow
def test_probe_max_batch_of_a_real_model():
    load = Workload(wide_net, TrainingData(*models.rows(4000)), "float32")
    with open_probes(load, memory_limit_bytes=64 * MB) as probes:
        result = probe_max_batch(probes, memory_window=WINDOW, max_batch_size=None)
        out, again = probes.read(4000), probes.read(2)
    runs = [p for p in result.probes if p.batch_size == result.max_batch_size]
    assert {"search", "fresh_process", "mixed_sizes"} == {p.purpose for p in runs}
    assert all(p.outcome == "fits" for p in runs)
    share = result.peak_memory_bytes / result.limit_bytes
    assert result.limit_bytes == 64 * MB
    assert (result.reason.code == "in_window") == (WINDOW[0] <= share <= WINDOW[1])
    assert result.reason.code in ("in_window", "next_above", "memory_jumps")
    assert share <= WINDOW[1]
    # At least one wide activation and its gradient are held.
    assert 4 * WIDTH * 2 <= result.fit.bytes_per_example < 4 * WIDTH * 8
    assert (result.device, result.dtype_policy, result.noted) == ("CPU:0", "float32", ())
    # Adam has two variables for each weight.
    weights = sum(np.prod(w.shape) for w in wide_net().weights) * 4
    assert result.weights_bytes == pytest.approx(3 * weights, abs=64)
    assert out.peak_bytes is None
    if out.free is not None:
        assert 0 < out.free.largest_block_bytes <= out.free.free_bytes <= 64 * MB
        assert out.free.requested_bytes > 100_000
    assert (again.rows, again.free) == (2, None)
    assert 0 < again.peak_bytes < 32 * MB


def ragged_batches():
    """Return batches of sequences with 3, 40 and 7 steps."""
    parts = [np.zeros((4, length, 8), "float32") for length in (3, 40, 7)]
    return tf.data.Dataset.from_generator(
        lambda: ((part, np.zeros((4, 3), "float32")) for part in parts),
        output_signature=(tf.TensorSpec((None, None, 8)), tf.TensorSpec((None, 3))),
    )


def sequence_model():
    model = keras.Sequential(
        [layers.Input((None, 8)), layers.Dense(16), layers.GlobalMaxPooling1D(), layers.Dense(3)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def full_batches_only(size):
    return tf.data.Dataset.from_tensor_slices(models.rows(50)).batch(size, drop_remainder=True)


DATA = {
    "weighted": lambda: tf.data.Dataset.from_tensor_slices((*models.rows(60), np.ones(60))),
    "without remainder": lambda: full_batches_only,
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_find_max_batch_size_reaches_the_end_of_the_data(data):
    size = 50 if callable(data()) else 60
    result = kbatch.find_max_batch_size(
        models.Locked(models.linear),
        data(),
        memory_limit_bytes=100 * MB,
        memory_window=np.array([0.8, 0.9]),
    )
    assert (result.max_batch_size, result.reason.code) == (size, "reached_data")
    assert repr(result.memory_window) == "(0.8, 0.9)"  # Not NumPy's numbers.
    assert result.notes[0].values == {"why": "not sendable"}


def probes_here(build, data, training=True):
    """Open probes in this process."""
    workload = Workload(build, data, "float32", training=training)
    return ProcessProbes(workload.start(), 1000 * MB, None)


def test_probe_of_a_function_that_drops_the_remainder():
    probes = probes_here(wide_net, TrainingData(full_batches_only))
    larger, exact = probes.read(64), probes.read(50)
    assert (larger.rows, exact.rows) == (50, 50)
    # The peaks include the wide activations.
    assert min(larger.peak_bytes, exact.peak_bytes) > probes.facts().held_bytes + 50 * 4 * WIDTH


def test_probe_uses_the_longest_of_ragged_rows():
    probes = probes_here(sequence_model, TrainingData(ragged_batches()))
    assert probes.read(4).rows == 4
    assert [note.code for note in probes.facts().notes] == ["rows_differ"]
    sample = TrainingData(ragged_batches()).some_rows(sequence_model())
    assert sample.rows[0].shape == (4, 40, 8)


def test_probe_uses_longest_example():
    y = np.zeros(3, "float32")
    examples = ((np.zeros((steps, 8), "float32"), y) for steps in (600, 6000))
    long, longer = (probes_here(sequence_model, TrainingData.of_example(e)) for e in examples)
    assert longer.read(64).peak_bytes > 5 * long.read(64).peak_bytes > 0


def test_probe_of_predictions_without_compile():
    def uncompiled():
        return keras.Sequential([layers.Input((8,)), layers.Dense(3)])

    probes = probes_here(uncompiled, TrainingData(models.rows(40)[0]), training=False)
    reading = probes.read(8)
    assert (probes.facts().training, reading.rows, reading.peak_bytes > 0) == (False, 8, True)


def trained_model(*extra, run_eagerly=False):
    """Return a trained model in mixed_float16 with state of every kind."""
    with dtype_policy_scope("mixed_float16"):
        outputs = layers.Dense(3, activation="softmax", dtype="float32")
        model = keras.Sequential([layers.Input((8,)), *extra, layers.Dropout(0.5), outputs])
        arguments = {"metrics": ["accuracy"], "jit_compile": False, "run_eagerly": run_eagerly}
        optimizer = keras.optimizers.Adam(use_ema=True)
        model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    model.fit(*models.rows(32), verbose=0)
    return model


def test_find_max_batch_size_restores_a_model_that_cannot_be_sent():
    class Halved(layers.Layer):
        def call(self, x):
            return x / 2

        def get_config(self):
            raise TypeError("this layer stays here")

    model = trained_model(Halved(), run_eagerly=True)
    kbatch.accumulate_gradients(model, 1)
    step, before, history = model.train_step, models.state_of(model), model.history
    result = kbatch.find_max_batch_size(
        model, *models.rows(40), memory_limit_bytes=100 * MB, max_batch_size=1
    )
    assert result.notes[0].values == {"why": "not sendable"}
    assert result.dtype_policy == "mixed_float16"
    assert all(map(np.array_equal, models.state_of(model), before))
    assert model.train_step is step
    assert model.history is history


@pytest.mark.slow
def test_find_max_batch_size_sends_a_compiled_model():
    model = trained_model()
    before = models.state_of(model)
    result = kbatch.find_max_batch_size(model, *models.rows(40), memory_limit_bytes=100 * MB)
    assert result.noted == ()
    assert result.dtype_policy == "mixed_float16"
    assert all(map(np.array_equal, models.state_of(model), before))
    assert "train_step" not in vars(model)


@pytest.mark.slow
def test_probe_of_a_model_that_accumulates():
    def build():
        return kbatch.accumulate_gradients(conv_net(), 8)

    load = Workload(build, TrainingData(*images(64)), "float32")
    model = build()
    sent = Workload(model_builder(model), load.data, "float32")
    for workload in (load, sent):
        with WorkerProbes(workload, 150 * MB, math.inf) as probes:
            # A whole batch of 256 needs more than 80 MB.
            assert probes.read(256).peak_bytes < 20 * MB


def wide():
    parts = [layers.Input((1000,)), layers.Dense(2500), layers.Dense(1)]
    return models.compiled(parts, "adam", "mse")


WIDE = np.zeros((8, 1000), "float32"), np.zeros((8, 1), "float32")


@pytest.mark.slow
def test_find_max_batch_size_limit_below_the_weights():
    with pytest.raises(OutOfMemoryError, match="could not be built") as caught:
        kbatch.find_max_batch_size(wide, *WIDE, memory_limit_bytes=40 * MB)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (None, 40 * MB)
    assert "limit of 38.1 MiB" in str(caught.value)


X, Y = models.rows(8)
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))
REFUSED = [
    *(
        ((X, Y), {"memory_window": window}, ValueError, "0 < low < high <= 1")
        for window in ((0.9, 0.8), (0, 0.5), (0.5, 1.1), 0.8)
    ),
    ((X, Y), {"memory_limit_bytes": 2e9}, TypeError, "memory_limit_bytes=2000000000.0"),
    ((X, Y), {"memory_limit_bytes": 5}, ValueError, "memory_limit_bytes=5"),
    ((X, Y), {"max_batch_size": 0}, ValueError, "max_batch_size=0"),
    ((X[:1], Y[:1]), {}, InputError, "two batch sizes"),
    ((lambda size: ROWS.batch(size).take(0),), {}, InputError, "returned no batch"),
    ((X,), {}, InputError, "needs targets.*give `y`"),
    ((5,), {}, InputError, "Give arrays"),
    ((tf.RaggedTensor.from_row_splits(X[:, 0], [0, 3, 8]), Y[:2]), {}, InputError, "RaggedTensor"),
]


@pytest.mark.parametrize(("data", "changed", "error", "message"), REFUSED)
def test_find_max_batch_size_invalid_arguments(data, changed, error, message):
    with pytest.raises(error, match=message):
        kbatch.find_max_batch_size(
            models.Locked(models.linear), *data, **({"memory_limit_bytes": 100 * MB} | changed)
        )


@pytest.mark.slow
def test_find_max_batch_size_with_xla():
    def build():
        return conv_net(4, jit_compile=True)

    result = kbatch.find_max_batch_size(build, *images(200), memory_limit_bytes=40 * MB)
    assert result.peak_memory_bytes <= 0.9 * 40 * MB
    assert {"search", "fresh_process", "mixed_sizes"} == {p.purpose for p in result.probes}
