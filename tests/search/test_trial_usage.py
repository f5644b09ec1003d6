"""Usage of GPUs in the record of a search, with a fake NVML and a fake list of devices."""

from types import SimpleNamespace

import fake_nvml
import pytest
import searches
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from tensorflow.core.framework import device_attributes_pb2
from tensorflow.python.client import device_lib

import kbatch
from kbatch.records.machine import USAGE_METRICS


@pytest.fixture
def library(monkeypatch):
    description = "device: 0, name: X, pci bus id: 0000:01:00.0, compute capability: 9.0"
    gpu = device_attributes_pb2.DeviceAttributes(
        name="/device:GPU:0", device_type="GPU", physical_device_desc=description
    )
    monkeypatch.setattr(device_lib, "list_local_devices", lambda config: [gpu])
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind: [SimpleNamespace(name="CPU:0")]
    )
    # The GPU takes 5 J between two readings.
    metered = FakeGpu(utilization_percent=40, energy_step_mj=5_000)
    return fake_nvml.install(monkeypatch, FakeNvml(metered))


def run_of(study):
    (trial,) = study.trials
    (run,) = trial.executions
    return run


def test_search_records_gpu_energy_and_utilization(library, tmp_path):
    tuner = searches.quick(tmp_path, searches.stock(batch_sizes=(16,)))
    study = kbatch.load_study(tuner)
    run = run_of(study)
    (gpu,) = run.usage.gpus
    assert (gpu.name, gpu.tensorflow_devices) == ("Fake GPU", ("GPU:0",))
    assert gpu.energy_j == 5.0 * (run.usage.readings - 1)
    assert run.joules_per_sample == gpu.energy_j / 94
    assert run.usage.duration_s >= run.total_s
    assert 2 <= len(gpu.samples) <= 100
    assert library.users == 0
    kept = tuner.oracle.get_trial(study.trials[0].trial_id).metrics
    metrics = {name: kept.get_history(name)[0].value[0] for name in kept.metrics}
    assert metrics["joules_per_sample"] == pytest.approx(run.joules_per_sample)
    assert metrics["gpu_utilization"] == pytest.approx(0.4)
    assert metrics["gpu_power_w"] == pytest.approx(300.0)
    assert study.to_dataframe()["gpu_utilization"].tolist() == [pytest.approx(0.4)]
    assert set(USAGE_METRICS).isdisjoint(run.reported)
