"""A stand-in for what TensorFlow tells of its GPUs, under its own functions."""

import types

import tensorflow as tf
from tensorflow.python.client import device_lib


class FakeTensorFlow:
    """GPUs as TensorFlow lists them.

    Args:
        physical: PCI bus ids of the GPUs that it finds.
        visible: Places in that list of those that the program chose; None for all.
        memory_limit: Bytes that its allocator has of each.
        set_mib: A limit that the program set for the first, in MiB.
    """

    def __init__(self, *physical, visible=None, memory_limit=2**34, set_mib=None):
        self.physical = [
            types.SimpleNamespace(name=f"/physical_device:GPU:{i}", bus_id=bus_id)
            for i, bus_id in enumerate(physical)
        ]
        chosen = range(len(physical)) if visible is None else visible
        self.visible = [self.physical[i] for i in chosen]
        self.memory_limit = memory_limit
        self.limits = {}
        if set_mib is not None:
            self.limits[self.visible[0].name] = [types.SimpleNamespace(memory_limit=set_mib)]

    def set_logical_device_configuration(self, gpu, logical):
        self.limits[gpu.name] = logical

    def list_local_devices(self, config):
        return [
            types.SimpleNamespace(
                name="/device:CPU:0", memory_limit=2**28, physical_device_desc=""
            ),
            *(
                types.SimpleNamespace(
                    name=f"/device:GPU:{i}",
                    memory_limit=self.memory_limit,
                    physical_device_desc=f"device: {i}, name: X, pci bus id: {gpu.bus_id}",
                )
                for i, gpu in enumerate(self.visible)
            ),
        ]


def install(monkeypatch, fake):
    """Lets TensorFlow have these GPUs for the length of a test."""
    config = tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: fake.physical)
    monkeypatch.setattr(config, "list_logical_devices", lambda kind: fake.visible)
    monkeypatch.setattr(config, "get_visible_devices", lambda kind: fake.visible)
    monkeypatch.setattr(
        config, "get_logical_device_configuration", lambda gpu: fake.limits.get(gpu.name)
    )
    monkeypatch.setattr(
        config, "set_logical_device_configuration", fake.set_logical_device_configuration
    )
    monkeypatch.setattr(
        config.experimental, "get_device_details", lambda gpu: {"device_name": "Fake GPU"}
    )
    monkeypatch.setattr(
        config.experimental, "get_memory_info", lambda name: {"current": 2**20, "peak": 2**20}
    )
    monkeypatch.setattr(device_lib, "list_local_devices", fake.list_local_devices)
    return fake
