import subprocess
import sys

import models
import pytest
import searches
import tensorflow as tf

import kbatch

pytestmark = pytest.mark.gpu


def multiply(seconds):
    """Keeps the first GPU busy."""
    with tf.device("GPU:0"):
        matrix = tf.random.normal([4096, 4096])
        started_s = tf.timestamp()
        while tf.timestamp() - started_s < seconds:
            matrix = tf.linalg.l2_normalize(matrix @ matrix)
        return float(tf.reduce_sum(matrix))


@pytest.fixture(scope="module")
def monitor(gpus):
    with kbatch.GpuMonitor() as monitor:
        multiply(3.0)
    return monitor


def test_every_gpu_of_tensorflow_is_found_in_nvml(monitor, gpus):
    assert monitor.unavailable is None
    names = [name for gpu in monitor.gpus for name in gpu.tensorflow_devices]
    logical = tf.config.list_logical_devices("GPU")
    assert names == [device.name.rpartition("/device:")[2] for device in logical]
    details = [tf.config.experimental.get_device_details(gpu)["device_name"] for gpu in gpus]
    assert [gpu.name for gpu in monitor.gpus] == details


def test_readings_are_plausible(monitor):
    for gpu in monitor.gpus:
        assert 2**30 < gpu.memory_total_bytes < 2**40
        for sample in gpu.samples:
            assert sample.utilization is None or 0 <= sample.utilization <= 1
            assert 0 < sample.memory_used_bytes <= gpu.memory_total_bytes
            assert sample.power_w is None or 1 < sample.power_w < 3000
            assert sample.temperature_c is None or 5 < sample.temperature_c < 110
            assert sample.sm_clock_mhz is None or 100 < sample.sm_clock_mhz < 5000


def test_work_takes_energy_and_the_two_ways_to_measure_it_agree(monitor):
    gpu = monitor.gpus[0]
    if gpu.energy_source is None:
        pytest.skip(f"{gpu.name} tells neither energy nor power")
    assert gpu.energy_j > 0
    if gpu.mean.power_w is not None:
        assert gpu.energy_j == pytest.approx(gpu.mean.power_w * monitor.usage.duration_s, rel=0.5)
    busiest = [s.utilization for s in gpu.samples if s.utilization is not None]
    assert not busiest or max(busiest) > 0.5


def test_the_peak_of_tensorflows_memory_moves(gpus):
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    with tf.device("GPU:0"):
        block = tf.ones([64 * 2**20 // 4])
    assert float(block[0]) == 1.0
    after = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    assert after - before >= 64 * 2**20
    del block
    assert tf.config.experimental.get_memory_info("GPU:0")["peak"] == after


def test_a_trial_holds_joules_per_sample(tmp_path):
    tuner = searches.search(tmp_path, searches.hypermodel(batch_sizes=(16,)))
    (trial,) = kbatch.load_study(tuner).trials
    (run,) = trial.executions
    if run.usage.gpus[0].energy_source is not None:
        assert run.joules_per_sample > 0
        metrics = tuner.oracle.get_trial(trial.trial_id).metrics
        assert metrics.exists("joules_per_sample")


SETTINGS = {
    "memory growth": "[tf.config.experimental.set_memory_growth(gpu, True) for gpu in gpus]",
    "two logical devices": (
        "tf.config.set_logical_device_configuration("
        "gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=512)] * 2)"
    ),
    "the last GPU alone": "tf.config.set_visible_devices(gpus[-1:], 'GPU');"
    "tf.config.experimental.set_memory_growth(gpus[-1], True)",
}
CHILD = """
import tensorflow as tf
from kbatch.instruments.tensorflow_gpus import tensorflow_gpus
gpus = tf.config.list_physical_devices("GPU")
{settings}
found = tensorflow_gpus()
names = sorted(name for names in found.values() for name in names)
logical = sorted(d.name.rpartition("/device:")[2] for d in tf.config.list_logical_devices("GPU"))
assert names == logical, (found, logical)
with tf.device("GPU:0"):
    assert float(tf.reduce_sum(tf.ones([1000]))) == 1000.0
"""


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_gpus_are_found_under_the_settings_of_the_program(settings):
    code = CHILD.format(settings=SETTINGS[settings])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_trains_while_it_is_watched():
    x, y = models.rows(256)
    with kbatch.GpuMonitor(interval_s=0.01) as monitor:
        models.mlp().fit(x, y, batch_size=32, epochs=2, verbose=0)
    assert monitor.usage.readings >= 2
