"""Probes of workloads that fail as on a GPU."""

import math

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.device.memory import DeviceMemory
from kbatch.errors import DeviceLostError, OutOfMemoryError
from kbatch.memory.probe import ProcessProbes, WorkerProbes
from kbatch.memory.workload import Reading, Run, Workload, WorkloadFacts
from kbatch.training.data.training_data import TrainingData

NO_LIBRARY = "failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED"
LOST = "Failed to allocate 8 bytes: CUDA_ERROR_ILLEGAL_ADDRESS"


class FailingRun(Run):
    """A workload that fails above a size with an error of a GPU."""

    def __init__(self, text, *, above=8, jit_compile=False):
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=jit_compile)
        load = Workload(lambda: model, TrainingData(np.zeros((2, 1))), "float32")
        super().__init__(load, model, DeviceMemory())
        self.text, self.above = text, above

    def variables_bytes(self):
        return 4

    def run(self, batch_size, after_first):
        if batch_size > self.above:
            raise tf.errors.InternalError(None, None, self.text)
        return batch_size


def test_process_probes_library_error_after_a_smaller_size():
    probes = ProcessProbes(FailingRun(NO_LIBRARY), None, None)
    with pytest.raises(tf.errors.InternalError, match="NOT_INITIALIZED"):
        probes.read(16)
    assert probes.read(8).peak_bytes is not None
    assert probes.read(16).peak_bytes is None


ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"


class FakeWorker:
    """A worker whose calls return prepared answers, or raise them if they are exceptions."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.processes = 1

    def read_output(self):
        return ""

    def call(self, *_):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart(self):
        self.processes += 1


def worker_probes(monkeypatch, *answers):
    worker = FakeWorker(*answers)
    monkeypatch.setattr("kbatch.memory.probe.Worker", lambda *_: worker)
    return WorkerProbes(None, None, math.inf), worker


def internal(text):
    return tf.errors.InternalError(None, None, text)


def test_worker_probes_library_error_after_a_restart(monkeypatch):
    answers = Reading(40, 8, 1.0), internal(NO_LIBRARY), internal(NO_LIBRARY)
    probes, _ = worker_probes(monkeypatch, *answers)
    assert probes.read(8).peak_bytes == 40
    probes.renew()
    assert probes.read(16).peak_bytes is None
    with pytest.raises(tf.errors.InternalError, match="NOT_INITIALIZED"):
        probes.read(8)


def test_worker_probes_lost_device_after_out_of_memory(monkeypatch):
    out, fits = Reading(None, 64, 1.0), Reading(40, 8, 1.0)
    probes, worker = worker_probes(monkeypatch, out, internal(ILLEGAL), fits, internal(ILLEGAL))
    assert probes.read(64).peak_bytes is None
    assert probes.read(8) == fits
    assert worker.processes == 2
    # Memory did not run out in this process, so the error is the model's or the device's.
    with pytest.raises(tf.errors.InternalError, match="ILLEGAL_ADDRESS"):
        probes.read(16)
    assert worker.processes == 2


@pytest.mark.parametrize("limit_bytes", [10**9, None])
def test_worker_probes_out_of_memory_while_building(monkeypatch, limit_bytes):
    probes, _ = worker_probes(monkeypatch, MemoryError())
    probes.limit_bytes = limit_bytes  # On a GPU only the worker knows it.
    with pytest.raises(OutOfMemoryError, match="could not be built") as caught:
        probes.facts()
    error = caught.value
    assert (error.examples, error.fitting_examples, error.needed_bytes) == (None, None, None)
    assert error.limit_bytes == limit_bytes


def test_worker_probes_facts_are_kept_after_a_restart(monkeypatch):
    facts = WorkloadFacts("GPU:0", 100, True, "float32", 4, 4, None, ())
    probes, worker = worker_probes(monkeypatch, facts, Reading(None, 64, 1.0, lost=True))
    assert probes.facts() == facts
    assert probes.read(64).lost
    assert probes.facts() == facts
    assert (worker.processes, worker.answers) == (2, [])


@pytest.mark.parametrize(("text", "jit_compile"), [(LOST, False), ("OOM when allocating", True)])
def test_process_probes_lost_device(text, jit_compile):
    probes = ProcessProbes(FailingRun(text, jit_compile=jit_compile), None, None)
    with pytest.raises(DeviceLostError, match="max_parallel=1"):
        probes.read(16)


class GreedyFirstStep(FailingRun):
    """A workload whose first step needs 64 MB more than later ones, as with autotuning."""

    def run(self, batch_size, after_first):
        tf.zeros([16 * 10**6]).numpy()
        after_first()
        return batch_size


def test_reading_separates_the_first_step():
    reading = ProcessProbes(GreedyFirstStep(""), None, None).read(8)
    assert reading.peak_bytes <= reading.first_step_bytes - 60 * 10**6


@pytest.mark.parametrize(
    ("first", "limit", "decides"), [(None, 50, 40), (90, 100, 40), (90, 80, 90), (30, 20, 40)]
)
def test_reading_bytes_below_limit(first, limit, decides):
    assert Reading(40, 8, 1.0, first_step_bytes=first).bytes_below(limit) == decides
    assert Reading(None, 8, 1.0, first_step_bytes=first).bytes_below(limit) is None


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_process_probes_compile_each_size_once(jit_compile):
    traced = []

    class Tracing(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    model = keras.Sequential([keras.layers.Input((8,)), Tracing(), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=jit_compile)
    x, y = models.rows(32)
    model.fit(x, y, verbose=0)
    function = model.train_function
    load = Workload(lambda: model, TrainingData(x, y), "float32", accumulate_below=16)
    probes = ProcessProbes(load.start(), None, None)
    for size in (16, 8, 4):  # A whole batch, and two micro-batch sizes.
        probes.read(size)
    traces, weights = len(traced), model.get_weights()
    for size in (8, 16, 4):
        assert probes.read(size).first_step_bytes is not None
    assert len(traced) == traces
    assert model.train_function is function
    assert "train_step" not in vars(model)
    assert all(map(np.array_equal, weights, model.get_weights()))


@pytest.mark.parametrize(("step_s", "count"), [(2.0, 5), (6.0, 3), (40.0, 2)])
def test_probe_ends_early_if_steps_are_slow(monkeypatch, step_s, count):
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock)
    steps = []

    class Slow(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            steps.append(clock.sleep(step_s))
            return super().compute_loss(*args, **kwargs)

    def build():
        model = Slow([keras.layers.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    source = TrainingData(models.rows(8)[0], models.rows(8, features=3)[0])
    reading = ProcessProbes(Workload(build, source, "float32").start(), None, None).read(4)
    assert len(steps) == count
    assert reading.peak_bytes > 0
