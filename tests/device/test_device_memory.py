import fake_nvml
import fake_tensorflow
import numpy as np
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from fake_tensorflow import FakeTensorFlow

from kbatch.device.memory import (
    DeviceMemory,
    FreeMemory,
    free_memory,
    gpu_visible,
    limit_gpu,
    set_limit_bytes,
    worker_device,
    workers_on_device,
)

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
GIB = 2**30


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "KBATCH_WORKERS_ON_DEVICE", "KBATCH_WORKERS_ON_HOST"):
        monkeypatch.delenv(name, raising=False)


def gpus(monkeypatch, *, mig=None, **tensorflow):
    """Install fakes of a host with two GPUs, of 16 GiB and of 40 GiB."""
    gpus = []
    for bus_id, gib in ((FIRST, 16), (SECOND, 40)):
        memory = {"memory_total_bytes": gib * GIB, "memory_used_bytes": 0}
        gpus.append(FakeGpu(bus_id=f"0000{bus_id}".encode(), mig=mig, **memory))
    fake_nvml.install(monkeypatch, FakeNvml(*gpus))
    return fake_tensorflow.install(monkeypatch, FakeTensorFlow(FIRST, SECOND, **tensorflow))


@pytest.mark.parametrize(
    ("tensorflow", "workers", "gib"),
    [
        ({"visible": [1], "memory_limit": 38 * GIB}, "1", 38),
        ({"visible": [1], "memory_limit": 38 * GIB}, "4", 10),
        # Other workers already hold their parts, so the remaining memory is not divided.
        ({"visible": [1], "memory_limit": 9 * GIB}, "4", 9),
        # A limit that the program sets is for this process alone.
        ({"visible": [1], "memory_limit": 30 * GIB, "set_mib": 30 * 1024}, "4", 30),
        ({"visible": [1], "memory_limit": 99 * GIB, "set_mib": 99 * 1024}, "1", 40),
        ({"visible": [1], "memory_limit": 8 * GIB, "mig": True}, "2", 4),
        ({"memory_limit": 15 * GIB}, "2", 8),
    ],
)
def test_device_memory_limit_bytes(monkeypatch, tensorflow, workers, gib):
    gpus(monkeypatch, **tensorflow)
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", workers)
    assert DeviceMemory().limit_bytes == gib * GIB


def test_device_memory_limit_without_nvml(monkeypatch):
    gpus(monkeypatch, memory_limit=12 * GIB)
    fake_nvml.install(monkeypatch, None)
    assert DeviceMemory().limit_bytes == 12 * GIB


def test_limit_gpu_limits_the_visible_gpu(monkeypatch):
    fake = gpus(monkeypatch, visible=[1])
    assert set_limit_bytes() is None
    limit_gpu(3 * GIB)
    assert list(fake.limits) == ["/physical_device:GPU:1"]
    assert set_limit_bytes() == 3 * GIB


def test_worker_device_without_visible_gpus(monkeypatch):
    gpus(monkeypatch, visible=[])
    assert not gpu_visible()
    assert DeviceMemory().limit_bytes is None
    assert worker_device() == {"CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(
    ("named", "visible", "worker"),
    [
        (None, None, "0"),
        (None, [1], "1"),
        ("2,5", None, "2"),
        ("2,5", [1], "5"),
        ("GPU-a,GPU-b", [1], "GPU-b"),
    ],
)
def test_worker_device_is_the_first_visible_gpu(monkeypatch, named, visible, worker):
    gpus(monkeypatch, visible=visible)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert worker_device() == {"CUDA_VISIBLE_DEVICES": worker}


def test_workers_on_device_without_a_gpu(monkeypatch):
    assert workers_on_device() is None
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", "1")
    monkeypatch.setenv("KBATCH_WORKERS_ON_HOST", "4")
    fake_tensorflow.install(monkeypatch, FakeTensorFlow())
    assert workers_on_device() == 4
    fake_tensorflow.install(monkeypatch, FakeTensorFlow(FIRST))
    assert workers_on_device() == 1


@pytest.mark.parametrize(
    ("tensorflow", "workers", "found"),
    [
        ({"memory_limit": 30 * GIB}, "1", (30 * GIB, 40 * GIB)),
        ({"memory_limit": 37 * GIB}, "1", None),
        # With several workers, a limit set by the program, or MIG, nobody else holds memory.
        ({"memory_limit": 30 * GIB}, "2", None),
        ({"memory_limit": 30 * GIB, "set_mib": 30 * 1024}, "1", None),
        ({"memory_limit": 5 * GIB, "mig": True}, "1", None),
    ],
)
def test_device_memory_held_by_others(monkeypatch, tensorflow, workers, found):
    gpus(monkeypatch, visible=[1], **tensorflow)
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", workers)
    assert DeviceMemory().held_by_others() == found


def test_device_memory_without_allocator_statistics(monkeypatch):
    def no_statistics(device):
        raise ValueError(f"Allocator stats not available for device '{device}'")

    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "reset_memory_stats", no_statistics)
    monkeypatch.setattr(experimental, "get_memory_info", no_statistics)
    memory = DeviceMemory()
    assert memory.device == "CPU:0"
    memory.reset()
    before = memory.peak_bytes
    held = np.ones(8 * 10**6)  # 64 MB
    assert memory.held_bytes > before + 50 * 10**6
    del held
    assert memory.peak_bytes > before + 50 * 10**6
    memory.reset()
    assert memory.peak_bytes < before + 30 * 10**6
    memory.device = "GPU:0"
    with pytest.raises(ValueError, match="GPU:0"):
        memory.reset()


# Lines of a real dump of a step with 600 images under 190 MiB, without most of its blocks.
DUMP = """\
(bfc_cpu_allocator_for_gpu) ran out of memory trying to allocate 37.50MiB (rounded to 39321600)\
requested by op StatefulPartitionedCall/gradient_tape/ReluGrad
bfc_allocator.cc:1056] Bin (16777216): 	Total Chunks: 1, Chunks in use: 0. 24.97MiB allocated
bfc_allocator.cc:1105] InUse at 7f13a5000040 of size 7372800 next 12
bfc_allocator.cc:1105] Free  at 7f13a5606040 of size 26181632 next 18446744073709551615
bfc_allocator.cc:1105] Free  at 7f13d9400840 of size 256 next 217
bfc_allocator.cc:1119] Total size in pool: 190.00MiB memory_limit_: 190.00MiB available size: 0B \
curr_region_allocation_bytes_: 256.00MiB
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("started\n" + DUMP + "traceback", (39_321_600, 26_181_632 + 256, 26_181_632)),
        # Memory that was never allocated is one more free block.
        (DUMP.replace("size: 0B", "size: 30MiB"), (39_321_600, 57_639_168, 30 * 2**20)),
        # The last failure counts.
        (DUMP + DUMP.replace("39321600", "8").replace("26181632", "512"), (8, 768, 512)),
        (DUMP[: DUMP.index("Total size")], None),
    ],
)
def test_free_memory_from_the_log_of_the_allocator(log, found):
    assert free_memory(log) == (found and FreeMemory(*found))
