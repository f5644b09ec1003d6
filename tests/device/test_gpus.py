"""GPUs: the driver's list, TensorFlow's names, and their distribution to workers."""

import itertools

import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.machine import device_environments, devices_by_bus_id, opened_nvml, usable_gpus


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "There is no NVIDIA driver"),
        (FakeNvml(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "driver is not loaded"),
        (FakeNvml(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "differ in version"),
        (FakeNvml(init=pynvml.NVML_ERROR_NO_PERMISSION), "Insufficient Permissions"),
        (object(), "Function Not Found"),
    ],
)
def test_opened_nvml_without_a_driver(monkeypatch, library, reason):
    fake_nvml.install(monkeypatch, library)
    with opened_nvml() as (gpus, unavailable):
        assert gpus == ()
    assert reason in unavailable
    assert len(unavailable.splitlines()) == 1


def test_opened_nvml_closes_after_an_exception(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(KeyboardInterrupt), opened_nvml(), opened_nvml():
        assert library.users == 2
        raise KeyboardInterrupt
    assert library.users == 0


def test_opened_nvml_keeps_the_error_of_the_block(monkeypatch):
    fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(ValueError, match="mine"), opened_nvml():
        pynvml.nvmlShutdown()
        raise ValueError("mine")


# A `physical_device_desc` of TensorFlow.
DESCRIPTION = "device: 0, name: NVIDIA H100, pci bus id: 0000:0b:00.0, compute capability: 9.0"


def test_devices_by_bus_id():
    texts = "", DESCRIPTION.replace("0b:", "c1:"), DESCRIPTION, DESCRIPTION
    names = "/device:CPU:0", "/device:GPU:0", "/device:GPU:1", "/device:GPU:2"
    devices = devices_by_bus_id(zip(names, texts, strict=True))
    # In TensorFlow's order, with the logical devices of a GPU together.
    assert list(devices.items()) == [
        ("00000000:c1:00.0", ("GPU:0",)),
        ("00000000:0b:00.0", ("GPU:1", "GPU:2")),
    ]


GPUS = ((), ("0",), ("GPU-a", "GPU-b", "GPU-c"), tuple("01234567"))


def test_device_environments_are_balanced():
    for workers, gpus in itertools.product((1, 2, 3, 5, 8), GPUS):
        environments = device_environments(workers, gpus)
        devices = [variables["CUDA_VISIBLE_DEVICES"] for variables in environments]
        assert len(environments) == workers
        assert set(devices) <= set(gpus or ("-1",))
        counts = [devices.count(device) for device in gpus or ("-1",)]
        assert max(counts) - min(counts) <= 1
        for device, variables in zip(devices, environments, strict=True):
            assert variables["KBATCH_WORKERS_ON_DEVICE"] == str(devices.count(device))
            assert variables["KBATCH_WORKERS_ON_HOST"] == str(workers)
            shared = device != "-1" and devices.count(device) > 1
            assert ("TF_FORCE_GPU_ALLOW_GROWTH" in variables) == shared


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0,2", ("0", "2")),
        ("GPU-a, GPU-b", ("GPU-a", "GPU-b")),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
    ],
)
def test_usable_gpus_from_the_environment(monkeypatch, text, gpus):
    fake_nvml.install(monkeypatch, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert usable_gpus() == gpus


@pytest.mark.parametrize(
    ("library", "gpus"),
    [
        (None, ()),
        (FakeNvml(init=fake_nvml.NOT_SUPPORTED), ()),
        (FakeNvml(), ()),
        (FakeNvml(*(FakeGpu(uuid=u) for u in (b"GPU-a", None, b"GPU-c"))), ("GPU-a", "GPU-c")),
    ],
    ids=["none", "bad", "no GPU", "three"],
)
def test_usable_gpus_from_nvml(monkeypatch, library, gpus):
    fake_nvml.install(monkeypatch, library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert usable_gpus() == gpus
