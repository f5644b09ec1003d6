import pytest

from kbatch.instruments.worker_devices import device_environments, usable_gpus, workers_on_device


@pytest.mark.parametrize("gpus", [(), ("0",), ("GPU-a", "GPU-b", "GPU-c"), tuple("01234567")])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_worker_has_one_device_and_none_has_two_more_than_another(workers, gpus):
    found = device_environments(workers, gpus)
    devices = [variables["CUDA_VISIBLE_DEVICES"] for variables in found]
    assert len(found) == workers
    assert set(devices) <= set(gpus or ("-1",))
    counts = [devices.count(device) for device in gpus or ("-1",)]
    assert max(counts) - min(counts) <= 1
    for device, variables in zip(devices, found, strict=True):
        assert workers_on_device(variables) == devices.count(device)
        shared = device != "-1" and devices.count(device) > 1
        assert ("TF_FORCE_GPU_ALLOW_GROWTH" in variables) == shared


def test_without_kbatch_distribute_nothing_is_known_of_other_workers():
    assert workers_on_device({}) is None


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
def test_the_gpus_are_those_that_the_environment_allows(text, gpus):
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": text}) == gpus
