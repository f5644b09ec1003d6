import tensorflow as tf
from tensorflow.core.framework import device_attributes_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import device_lib

from kbatch.device.memory import tensorflow_gpus, tensorflow_memory


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


def test_tensorflows_memory_of_a_device_is_its_limit_and_what_tensors_hold():
    total_bytes, read_used_bytes = tensorflow_memory(["CPU:0"])
    assert total_bytes == 256 * 2**20  # What TensorFlow writes for a CPU.
    # A CPU's allocator counts only where it was told to.
    assert read_used_bytes() is None or read_used_bytes() >= 0
    assert tensorflow_memory(["GPU:7"]).memory_total_bytes is None
    assert tensorflow_memory(["GPU:7"]).read_used_bytes() is None
