import os
import subprocess
import sys
import types

import fake_nvml
import fake_tensorflow
import numpy as np
import psutil
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from fake_tensorflow import FakeTensorFlow

from kbatch import library_internals
from kbatch.device import memory as device_memory
from kbatch.device.memory import (
    DeviceMemory,
    check_memory_limit,
    gpu_in_use,
    gpu_visible,
    limit_gpu,
    nvml_gpu,
    other_processes,
    set_limit_bytes,
    worker_device,
    workers_on_device,
)
from kbatch.page.environment import neighbours_text
from kbatch.records.machine import GpuProcess

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
GIB = 2**30
# Larger than the number of any process of a host, whose name would be read.
FIVE, SEVEN, NINE = 5_000_005, 5_000_007, 5_000_009


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "KBATCH_WORKERS_ON_DEVICE", "KBATCH_WORKERS_ON_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("visible", [True, False])
def test_a_gpu_is_in_use_once_tensorflow_has_started(monkeypatch, started, visible):
    running = types.SimpleNamespace(_initialized=started)
    monkeypatch.setattr(library_internals.context, "context", lambda: running)
    monkeypatch.setattr(device_memory, "gpu_visible", lambda: visible)
    assert gpu_in_use() == (started and visible)


def gpus(monkeypatch, *, mig=None, first=None, second=None, **tensorflow):
    """A host of two GPUs, the first of 16 GiB and the second of 40, with processes on them."""
    library = FakeNvml(
        *(
            FakeGpu(
                bus_id=f"0000{bus_id}".encode(),
                memory_total_bytes=gib * GIB,
                memory_used_bytes=0,
                mig=mig,
                processes=processes or {},
            )
            for bus_id, gib, processes in ((FIRST, 16, first), (SECOND, 40, second))
        )
    )
    fake_nvml.install(monkeypatch, library)
    return fake_tensorflow.install(monkeypatch, FakeTensorFlow(FIRST, SECOND, **tensorflow))


@pytest.mark.parametrize(
    ("tensorflow", "workers", "gib"),
    [
        ({"visible": [1], "memory_limit": 38 * GIB}, "1", 38),
        ({"visible": [1], "memory_limit": 38 * GIB}, "4", 10),
        # The others hold their parts already: the rest is not divided.
        ({"visible": [1], "memory_limit": 9 * GIB}, "4", 9),
        # Who sets a limit has said what this process may take.
        ({"visible": [1], "memory_limit": 30 * GIB, "set_mib": 30 * 1024}, "4", 30),
        ({"visible": [1], "memory_limit": 99 * GIB, "set_mib": 99 * 1024}, "1", 40),
        ({"visible": [1], "memory_limit": 8 * GIB, "mig": True}, "2", 4),
        ({"memory_limit": 15 * GIB}, "2", 8),
    ],
)
def test_the_limit_is_that_of_the_device_that_tensorflow_uses(
    monkeypatch, tensorflow, workers, gib
):
    gpus(monkeypatch, **tensorflow)
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", workers)
    assert DeviceMemory().limit_bytes == gib * GIB


def test_without_nvml_the_limit_is_tensorflows(monkeypatch):
    gpus(monkeypatch, memory_limit=12 * GIB)
    fake_nvml.install(monkeypatch, None)
    assert DeviceMemory().limit_bytes == 12 * GIB


def test_a_limit_is_set_for_the_gpu_that_the_program_chose(monkeypatch):
    fake = gpus(monkeypatch, visible=[1])
    assert set_limit_bytes() is None
    limit_gpu(3 * GIB)
    assert list(fake.limits) == ["/physical_device:GPU:1"]
    assert set_limit_bytes() == 3 * GIB


def test_a_program_that_hid_all_gpus_sees_none(monkeypatch):
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
def test_a_worker_is_given_the_gpu_of_this_process_alone(monkeypatch, named, visible, worker):
    gpus(monkeypatch, visible=visible)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert worker_device() == {"CUDA_VISIBLE_DEVICES": worker}


def test_workers_whose_tensorflow_sees_no_gpu_share_the_host(monkeypatch):
    assert workers_on_device() is None
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", "1")
    monkeypatch.setenv("KBATCH_WORKERS_ON_HOST", "4")
    fake_tensorflow.install(monkeypatch, FakeTensorFlow())
    assert workers_on_device() == 4
    fake_tensorflow.install(monkeypatch, FakeTensorFlow(FIRST))
    assert workers_on_device() == 1


def test_a_limit_above_the_memory_of_the_gpu_is_refused(monkeypatch):
    gpus(monkeypatch)
    assert check_memory_limit(40 * GIB) == 40 * GIB
    with pytest.raises(ValueError, match=f"at most.*{40 * GIB} bytes.*Received: .*{41 * GIB}"):
        check_memory_limit(41 * GIB)
    fake_tensorflow.install(monkeypatch, FakeTensorFlow())  # On a CPU it is no business of theirs.
    assert check_memory_limit(41 * GIB) == 41 * GIB


OWN = os.getpid()


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ({OWN: 30 * GIB}, ()),
        (
            {OWN: 9 * GIB, SEVEN: 30 * GIB, NINE: GIB},
            (GpuProcess(SEVEN, 30 * GIB),),
        ),  # 1 of 40 GiB is small.
        ({OWN: 9 * GIB, SEVEN: None}, (GpuProcess(SEVEN, None),)),
        # In a container the numbers may be those of the host: then who is who is not known.
        ({SEVEN: 30 * GIB}, ()),
    ],
)
def test_who_else_holds_the_gpu_is_named_with_how_much(monkeypatch, second, found):
    gpus(monkeypatch, visible=[1], first={OWN: GIB, FIVE: 15 * GIB}, second=second)
    assert other_processes() == found


def test_the_program_of_another_process_is_named(monkeypatch):
    other, name = os.getppid(), psutil.Process(os.getppid()).name()
    gpus(monkeypatch, first={OWN: GIB, other: 15 * GIB})
    monkeypatch.setattr("kbatch.device.gpus.in_container", lambda: False)
    (found,) = other_processes()
    assert found == GpuProcess(other, 15 * GIB, name)
    assert f"process {other} ({name}) 15.0 GiB" in neighbours_text([found])
    monkeypatch.setattr("kbatch.device.gpus.in_container", lambda: True)
    assert other_processes() == (GpuProcess(other, 15 * GIB),)


def test_where_tensorflow_could_not_start_all_gpus_are_looked_at(monkeypatch):
    gpus(monkeypatch, first={FIVE: 15 * GIB}, second={SEVEN: 39 * GIB})
    found = (GpuProcess(FIVE, 15 * GIB), GpuProcess(SEVEN, 39 * GIB))
    assert other_processes(on_any_gpu=True) == found
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", "2")  # They have parts of their own.
    assert other_processes(on_any_gpu=True) == ()


def test_in_a_container_an_own_worker_is_not_named_as_another_process(monkeypatch):
    """The driver tells the host's numbers there: which of them is the worker's is not known."""
    gpus(monkeypatch, first={FIVE: 15 * GIB})
    monkeypatch.setattr(device_memory, "gpu_in_use", lambda: False)
    monkeypatch.setattr(device_memory, "in_container", lambda: True)
    assert other_processes(on_any_gpu=True) == (GpuProcess(FIVE, 15 * GIB),)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert other_processes(on_any_gpu=True) == ()
    finally:
        worker.communicate(b"\n")
    monkeypatch.setattr(device_memory, "gpu_in_use", lambda: True)
    assert other_processes(on_any_gpu=True) == ()


def test_without_a_gpu_or_its_driver_nobody_holds_it(monkeypatch):
    gpus(monkeypatch, visible=[], first={FIVE: 15 * GIB})
    assert other_processes(on_any_gpu=True) == ()
    gpus(monkeypatch)
    fake_nvml.install(monkeypatch, None)
    assert (other_processes(), nvml_gpu()) == ((), None)


def test_where_the_allocator_keeps_no_count_the_process_is_read(monkeypatch):
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
