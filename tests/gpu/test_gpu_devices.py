"""What the driver, TensorFlow and kbatch say of the same GPU."""

import csv
import dataclasses
import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpus(scale):
    """TensorFlow's physical GPUs."""
    import tensorflow as tf

    if not scale.on_gpu:
        pytest.skip("compares readings of a GPU")
    return tf.config.list_physical_devices("GPU")


def test_the_versions_are_known_and_nothing_is_missing(scale, record_property):
    from kbatch.cli.doctor import gpu_findings
    from kbatch.device.machine import read_environment

    environment = read_environment()
    record_property("environment", dataclasses.asdict(environment))
    findings = list(gpu_findings(lambda: environment.devices, os.environ))
    record_property("kbatch doctor", ", ".join(f"{one.topic} {one.status}" for one in findings))
    assert not [one for one in findings if one.status == "missing"]
    assert not scale.on_gpu or "nvidia-driver" in environment.versions


def test_nvml_and_nvidia_smi_agree(gpus, record_property):
    from kbatch.device.machine import opened_nvml, read_driver_version, read_gpu

    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not on the path")
    names = "uuid,name,memory.total,power.draw,driver_version"
    words = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    shown = {row[0]: row[1:] for row in csv.reader(text.splitlines(), skipinitialspace=True)}
    with opened_nvml() as (found, _):
        readings = {gpu.uuid: (gpu, read_gpu(gpu)[0]) for gpu in found}
        driver = read_driver_version()
    assert set(readings) == set(shown)
    for uuid, (gpu, reading) in readings.items():
        name, memory_mib, power_w, version = shown[uuid]
        assert (gpu.name, driver) == (name, version)
        for mine, theirs, near in (
            (gpu.memory_total_bytes and gpu.memory_total_bytes / 2**20, memory_mib, {"rel": 0.02}),
            (reading.power_w, power_w, {"rel": 0.5, "abs": 30}),
        ):
            # What a GPU does not support nvidia-smi writes in brackets.
            assert (mine is None) == theirs.startswith("[")
            assert mine is None or mine == pytest.approx(float(theirs), **near)
        record_property(uuid[:12], f"{name}, {memory_mib} MiB, {power_w} W")


def test_work_is_seen_and_its_energy_agrees_with_its_power(gpus, record_property):
    import tensorflow as tf

    import kbatch

    with kbatch.GpuMonitor() as monitor, tf.device("GPU:0"):
        matrix = tf.random.normal([4096, 4096])
        started_s = float(tf.timestamp())
        while float(tf.timestamp()) - started_s < 4.0:
            for _ in range(20):
                matrix = tf.linalg.l2_normalize(matrix @ matrix)
            assert float(tf.reduce_sum(matrix)) == pytest.approx(0, abs=1e9)
    assert monitor.unavailable is None
    names = [name for gpu in monitor.gpus for name in gpu.tensorflow_devices]
    logical = tf.config.list_logical_devices("GPU")
    assert names == [device.name.rpartition("/device:")[2] for device in logical]
    details = [tf.config.experimental.get_device_details(gpu)["device_name"] for gpu in gpus]
    assert [gpu.name for gpu in monitor.gpus] == details
    first = monitor.gpus[0]
    for sample in first.samples:
        assert sample.utilization is None or 0 <= sample.utilization <= 1
        assert sample.power_w is None or 1 < sample.power_w < 3000
    busiest = [s.utilization for s in first.samples if s.utilization is not None]
    assert not busiest or max(busiest) > 0.5
    if first.energy_j is not None and first.mean.power_w is not None:
        watched_j = first.mean.power_w * monitor.usage.duration_s
        assert first.energy_j == pytest.approx(watched_j, rel=0.3)
    record_property("energy", f"{first.energy_j} J by {first.energy_source}")
    record_property("mean power", f"{first.mean.power_w} W")
    record_property("samples", str(len(first.samples)))


def test_the_peak_of_tensorflows_memory_moves(limited):
    import tensorflow as tf

    from kbatch.device.memory import DeviceMemory

    memory, size = DeviceMemory(), 64 * 2**20
    memory.reset()
    before = memory.peak_bytes
    block = tf.ones([size // 4])
    assert float(block[0]) == 1.0
    after = memory.peak_bytes
    assert size <= after - before < 1.2 * size
    del block
    assert memory.peak_bytes == after
    assert memory.held_bytes < after
    assert memory.limit_bytes in (None, limited.limit_bytes)


@pytest.mark.parametrize("settings", ["memory growth", "two logical devices", "the last GPU alone"])
def test_gpus_are_found_under_the_settings_of_the_program(gpus, settings):
    import tensorflow as tf

    from kbatch.device.memory import tensorflow_gpus

    if settings == "two logical devices":
        halves = [tf.config.LogicalDeviceConfiguration(memory_limit=512)] * 2
        tf.config.set_logical_device_configuration(gpus[0], halves)
    else:
        used = gpus[-1:] if settings == "the last GPU alone" else gpus
        tf.config.set_visible_devices(used, "GPU")
        for gpu in used:
            tf.config.experimental.set_memory_growth(gpu, True)
    found = tensorflow_gpus()
    names = sorted(name for names in found.values() for name in names)
    logical = tf.config.list_logical_devices("GPU")
    assert names == sorted(device.name.rpartition("/device:")[2] for device in logical)
