import itertools

import fake_nvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpus import device_environments, usable_gpus

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


def four_gpus():
    return [
        FakeGpu(bus_id=f"00000000:0{i}:00.0".encode(), uuid=f"GPU-{i}abc".encode())
        for i in range(4)
    ]


@pytest.mark.parametrize(
    "library",
    [None, FakeNvml(init=fake_nvml.NOT_SUPPORTED), FakeNvml()],
    ids=["none", "bad", "no GPU"],
)
def test_without_a_gpu_that_answers_there_is_none_and_any_name_is_taken(monkeypatch, library):
    fake_nvml.install(monkeypatch, library)
    assert usable_gpus({}) == ()
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "7"}) == ("7",)


@pytest.mark.parametrize("named", ["0,3", "GPU-2abc,GPU-0", "MIG-1234", "2,-1,9"])
def test_gpus_that_exist_are_taken_by_number_and_by_uuid(monkeypatch, named):
    fake_nvml.install(monkeypatch, FakeNvml(*four_gpus()))
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": named})


@pytest.mark.parametrize(("named", "missing"), [("0,4", "4"), ("GPU-9", "GPU-9"), ("12", "12")])
def test_a_gpu_that_does_not_exist_is_named(monkeypatch, named, missing):
    fake_nvml.install(monkeypatch, FakeNvml(*four_gpus()))
    text = f"4 GPUs, numbers 0 to 3.*CUDA_VISIBLE_DEVICES={named}, where {missing} does not exist"
    with pytest.raises(ValueError, match=text):
        usable_gpus({"CUDA_VISIBLE_DEVICES": named})


def test_the_number_of_a_lost_gpu_exists(monkeypatch):
    gpus = four_gpus()
    gpus[3].lost = True
    fake_nvml.install(monkeypatch, FakeNvml(*gpus))
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "3"}) == ("3",)
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "GPU-3abc"}) == ("GPU-3abc",)
