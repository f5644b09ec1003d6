"""GPUs as the driver lists them, as TensorFlow names them, and as workers share them out."""

import itertools

import fake_nvml
import pynvml
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from tensorflow.core.framework import device_attributes_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import device_lib

from kbatch.device.gpus import (
    NvmlUnavailableError,
    device_environments,
    devices_by_bus_id,
    normal_bus_id,
    opened_nvml,
    usable_gpus,
)
from kbatch.device.memory import tensorflow_gpus


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "There is no NVIDIA driver"),
        (FakeNvml(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "driver is not loaded"),
        (FakeNvml(init=pynvml.NVML_ERROR_NO_PERMISSION), "Insufficient Permissions"),
        (object(), "Function Not Found"),
    ],
)
def test_without_a_driver_one_line_says_why(monkeypatch, library, reason):
    fake_nvml.install(monkeypatch, library)
    with pytest.raises(NvmlUnavailableError, match=reason) as raised, opened_nvml():
        pass
    assert len(str(raised.value).splitlines()) == 1


def test_the_library_is_closed_however_the_block_ends(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(KeyboardInterrupt), opened_nvml(), opened_nvml():
        assert library.users == 2
        raise KeyboardInterrupt
    assert library.users == 0


def test_a_driver_that_went_away_does_not_cover_what_the_block_raised(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(ValueError, match="mine"), opened_nvml():
        library.users = 0
        raise ValueError("mine")


# As TensorFlow's C++ writes `physical_device_desc`.
DESCRIPTION = "device: 0, name: NVIDIA H100, pci bus id: 0000:0b:00.0, compute capability: 9.0"


@pytest.mark.parametrize(
    "text",
    ["0000:0b:00.0", "00000000:0B:00.0", "0000:0B:00.0", " 0000:0b:00.0\n", "0:0b:00.0", "0:0b:00"],
)
def test_one_place_has_one_form(text):
    assert normal_bus_id(text) == "00000000:0b:00.0"


def test_the_form_is_its_own_and_other_places_stay_apart():
    texts = ["0000:01:00.0", "0001:01:00.0", "0000:02:00.0", "0000:01:01.0", "0000:01:00.1"]
    normal = [normal_bus_id(text) for text in texts]
    assert len(set(normal)) == len(texts)
    assert [normal_bus_id(text) for text in normal] == normal
    assert normal_bus_id("10000:01:00.0") == "00010000:01:00.0"


@pytest.mark.parametrize("text", ["", "<undefined>", "0000:01", "GPU-5f0c", "0000:01:00.0.1"])
def test_what_is_no_bus_id_has_none(text):
    assert normal_bus_id(text) is None


def test_devices_are_found_by_their_descriptions():
    other = DESCRIPTION.replace("0b:", "c1:")
    found = devices_by_bus_id(
        [("/device:CPU:0", ""), ("/device:GPU:0", other), ("/device:GPU:1", DESCRIPTION)]
    )
    assert found == {"00000000:c1:00.0": ("GPU:0",), "00000000:0b:00.0": ("GPU:1",)}
    assert next(iter(found)) == "00000000:c1:00.0"


def test_logical_devices_of_one_gpu_belong_together():
    found = devices_by_bus_id([("/device:GPU:0", DESCRIPTION), ("/device:GPU:1", DESCRIPTION)])
    assert found == {"00000000:0b:00.0": ("GPU:0", "GPU:1")}


def test_the_device_list_is_read_under_the_settings_of_the_running_context(monkeypatch):
    configs = []

    def devices(config):
        configs.append(config)
        description = "device: 0, name: X, pci bus id: 0000:c1:00.0, compute capability: 9.0"
        return [
            device_attributes_pb2.DeviceAttributes(name="/device:CPU:0", device_type="CPU"),
            device_attributes_pb2.DeviceAttributes(
                name="/device:GPU:0", device_type="GPU", physical_device_desc=description
            ),
        ]

    monkeypatch.setattr(device_lib, "list_local_devices", devices)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
    assert tensorflow_gpus() == {"00000000:c1:00.0": ("GPU:0",)}
    assert isinstance(configs[0], config_pb2.ConfigProto)


def test_the_device_list_of_the_installed_tensorflow_takes_those_settings():
    from tensorflow.python.eager import context

    (cpu,) = [
        device
        for device in device_lib.list_local_devices(context.context().config)
        if device.device_type == "CPU"
    ]
    assert (cpu.name, cpu.physical_device_desc) == ("/device:CPU:0", "")


GPUS = ((), ("0",), ("GPU-a", "GPU-b", "GPU-c"), tuple("01234567"))


def test_every_worker_has_one_device_and_none_has_two_more_than_another():
    for workers, gpus in itertools.product((1, 2, 3, 5, 8), GPUS):
        found = device_environments(workers, gpus)
        devices = [variables["CUDA_VISIBLE_DEVICES"] for variables in found]
        assert len(found) == workers
        assert set(devices) <= set(gpus or ("-1",))
        counts = [devices.count(device) for device in gpus or ("-1",)]
        assert max(counts) - min(counts) <= 1
        for device, variables in zip(devices, found, strict=True):
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
def test_the_gpus_are_those_that_the_environment_allows(monkeypatch, text, gpus):
    fake_nvml.install(monkeypatch, None)
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": text}) == gpus


@pytest.mark.parametrize(
    ("library", "gpus"),
    [
        (None, ()),
        (FakeNvml(init=fake_nvml.NOT_SUPPORTED), ()),
        (FakeNvml(), ()),
        (
            FakeNvml(*(FakeGpu(uuid=uuid) for uuid in (b"GPU-a", None, b"GPU-c"))),
            ("GPU-a", "GPU-c"),
        ),
    ],
    ids=["none", "bad", "no GPU", "three"],
)
def test_without_names_they_are_those_that_answer(monkeypatch, library, gpus):
    fake_nvml.install(monkeypatch, library)
    assert usable_gpus({}) == gpus
