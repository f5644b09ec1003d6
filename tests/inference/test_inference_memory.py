"""The ascent with probes that tell what a test wants, then with real ones that run out."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from kbatch.inference.call_paths import InferenceInputs, inference_inputs
from kbatch.inference.measure import measure_predict_memory
from kbatch.memory.find import memory_pass
from kbatch.memory.probe import Reading, WorkerProbes
from kbatch.memory.workload import Workload
from kbatch.training.data.training_data import TrainingData

LIMIT = 1000


class Probes:
    """Memory of 100 bytes and some bytes an example; it runs out above the limit."""

    isolated = True
    facts = types.SimpleNamespace(limit_bytes=LIMIT, held_bytes=50, notes=())

    def __init__(self, each=10, hidden_from=None):
        self.each = each
        self.hidden_from = hidden_from
        self.sizes = []

    def read(self, batch_size):
        self.sizes.append(batch_size)
        each = self.each
        if self.hidden_from is not None and batch_size >= self.hidden_from:
            each *= 10
        peak = 100 + each * batch_size
        return Reading(peak if peak <= LIMIT else None, batch_size, 0.1)

    def renew(self):
        return True


def ascend(probes, sizes, **changed):
    arguments = {
        "dtype_policy": "float32",
        "time_budget_s": 100.0,
        "clock": lambda: 0.0,
        "say": lambda line: None,
    }
    return memory_pass(probes, sizes, **(arguments | changed)).records


def test_a_single_size_refuses_no_other_one_where_a_worker_runs_out():
    """Of the 150 bytes of one example 100 are there whatever the batch: 256 need 356."""
    probes = Probes(each=1)
    records = ascend(probes, (1, 256))
    assert [(r.batch_size, r.outcome) for r in records] == [(1, "fits"), (256, "fits")]
    probes.isolated = False
    assert [r.outcome for r in ascend(probes, (1, 256))] == ["fits", "not_run"]


def test_what_is_expected_above_the_window_is_not_run():
    probes = Probes()
    records = ascend(probes, (1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert probes.sizes == [1, 2, 4, 8, 16, 32, 64]
    assert [r.outcome for r in records] == ["fits"] * 7 + ["not_run"] * 2
    assert records[7].guarded
    assert "90%" in records[7].reason


def test_memory_that_runs_out_is_a_result_and_nothing_larger_is_run():
    probes = Probes(hidden_from=16)
    records = ascend(probes, (1, 4, 8, 16, 32))
    assert probes.sizes == [1, 4, 8, 16]
    assert [r.outcome for r in records] == ["fits"] * 3 + ["out_of_memory", "not_run"]
    assert records[3].peak_bytes is None
    assert records[4].guarded
    assert "ran out at batch size 16" in records[4].reason


def test_the_time_ends_it_after_two_sizes_without_calling_the_rest_too_large():
    seconds = iter([0.0, 2.0, 3.0])
    records = ascend(Probes(), (1, 2, 4, 8), time_budget_s=2.5, clock=lambda: next(seconds))
    assert [r.outcome for r in records] == ["fits", "fits", "fits", "not_run"]
    assert not any(r.guarded for r in records)
    seconds = iter([0.0, 9.0, 9.0])
    records = ascend(Probes(), (1, 2, 4, 8), time_budget_s=2.5, clock=lambda: next(seconds))
    assert [r.outcome for r in records] == ["fits", "fits", "not_run", "not_run"]


def measure_memory(model, inputs, sizes, *, memory_limit_bytes):
    return measure_predict_memory(
        {"float32": model},
        inputs,
        sizes,
        memory_limit_bytes=memory_limit_bytes,
        time_budget_s=100.0,
        say=lambda line: None,
    )


def wide():
    """A model whose activations take 64 KiB an example."""
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(16384, activation="relu"), layers.Dense(1)]
    )


class Unsendable(keras.layers.Layer):
    """A layer that no other process can be told of."""

    def call(self, x):
        return 2 * x

    def get_config(self):
        raise TypeError("this layer stays here")


def test_a_model_that_cannot_be_sent_is_measured_here_and_the_profile_says_so():
    others = tf.zeros(2**27, tf.uint8)  # No part of the model, so no part of each example.
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Unsendable()(inputs))
    found = measure_memory(
        model,
        InferenceInputs(np.zeros((4, 4), "float32"), None),
        (1, 2),
        memory_limit_bytes=2**28,
    )
    assert [r.outcome for r in found.records] == ["fits", "fits"]
    assert "cannot be sent to a worker process" in " ".join(found.notes)
    with contextlib.suppress(ValueError):  # Where TensorFlow's allocator keeps count, as usual.
        tf.config.experimental.get_memory_info("CPU:0")
        assert found.records[0].peak_bytes >= others.shape[0]


@pytest.mark.slow
def test_every_one_of_3_real_ends_of_memory_is_survived():
    """Under a cap of 96 MiB: somewhat too large a batch raises, gross ones end the worker."""
    model = wide()
    inputs = inference_inputs(model)
    load = Workload(lambda: model, TrainingData(inputs.rows), "float32", training=False)
    survived = 0
    with WorkerProbes(load, 96 * 2**20) as probes:
        for size in (1600, 100_000, 1800):
            outcomes = [r.outcome for r in ascend(probes, (1, size))]
            survived += outcomes == ["fits", "out_of_memory"]
    assert survived == 3
