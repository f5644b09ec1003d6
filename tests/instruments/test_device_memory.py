import types

import pytest

from kbatch.instruments import device_memory
from kbatch.instruments.device_memory import gpu_in_use, usable_bytes


@pytest.mark.parametrize(
    ("device_bytes", "set_bytes", "workers", "usable"),
    [
        (1000, None, 1, 1000),
        (1000, None, 3, 333),
        (1000, 400, 1, 400),
        (1000, 4000, 1, 1000),
        (1000, 900, 2, 900),  # Who sets a limit has said what this process may take.
        (None, 400, 1, 400),
        (None, None, 2, None),
    ],
)
def test_a_process_may_take_what_was_set_and_there_is_or_its_part(
    device_bytes, set_bytes, workers, usable
):
    assert usable_bytes(device_bytes, set_bytes, workers) == usable


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("visible", [True, False])
def test_a_gpu_is_in_use_once_tensorflow_has_started(monkeypatch, started, visible):
    running = types.SimpleNamespace(_initialized=started)
    monkeypatch.setattr(device_memory.context, "context", lambda: running)
    monkeypatch.setattr(device_memory, "gpu_visible", lambda: visible)
    assert gpu_in_use() == (started and visible)


def test_a_tensorflow_that_no_longer_tells_is_not_taken_for_a_free_gpu(monkeypatch):
    monkeypatch.setattr(device_memory.context, "context", object)
    with pytest.raises(AttributeError, match="_initialized"):
        gpu_in_use()


class Logical:
    memory_limit = 4000


@pytest.mark.parametrize(("limits", "usable"), [([Logical()], 2000 * 2**20), ([], 500 * 2**20)])
def test_the_limit_of_a_gpu_is_bounded_by_what_it_has_and_shared(monkeypatch, limits, usable):
    monkeypatch.setenv("KBATCH_WORKERS_ON_DEVICE", "3")
    monkeypatch.setattr(device_memory, "gpu_visible", lambda: True)
    config = device_memory.tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: ["the GPU"])
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: limits)
    monkeypatch.setattr(device_memory, "_total_bytes", lambda: 2000 * 2**20)
    listed = [types.SimpleNamespace(name="/device:GPU:0", memory_limit=1500 * 2**20)]
    monkeypatch.setattr(device_memory.device_lib, "list_local_devices", lambda: listed)
    assert device_memory.DeviceMemory().limit_bytes == usable
