import tensorflow as tf
from tensorflow.core.framework import device_attributes_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import device_lib

from kbatch.device.memory import tensorflow_gpus


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
