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
