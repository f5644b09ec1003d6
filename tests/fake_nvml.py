"""A stand-in for NVML's shared library, under the real `pynvml`.

`pynvml` calls it as it calls what `ctypes.CDLL` returns: by the names of the C functions, with
structures passed by reference for it to fill.
"""

import ctypes
import dataclasses

import pynvml

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


@dataclasses.dataclass
class FakeGpu:
    """One GPU; a reading that is None is not supported."""

    bus_id: bytes = b"00000000:01:00.0"
    name: bytes = b"Fake GPU"
    utilization_percent: int | None = 50
    memory_total_bytes: int | None = 80 * 2**30
    memory_used_bytes: int = 72 * 2**30
    power_mw: int | None = 300_000
    energy_mj: int | None = 1_000_000
    uuid: bytes | None = b"GPU-0000aaaa"
    mig: bool | None = None
    lost: bool = False


class FakeNvml:
    """The library's functions, as far as kbatch needs them.

    Its version of the driver is `driver`.

    Args:
        gpus: The GPUs.
        init: What `nvmlInitWithFlags` returns.
    """

    driver = b"580.65.06"

    def __init__(self, *gpus, init=pynvml.NVML_SUCCESS):
        self.gpus = list(gpus)
        self.users = 0
        self.calls = 0
        self._init = init

    def nvmlInitWithFlags(self, flags):
        if self._init == pynvml.NVML_SUCCESS:
            self.users += 1
        return self._init

    def nvmlShutdown(self):
        if not self.users:
            return pynvml.NVML_ERROR_UNINITIALIZED
        self.users -= 1
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        # A handle is an address that only the library looks at.
        ctypes.c_void_p.from_address(ctypes.addressof(device._obj)).value = index.value + 1
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetPciInfo_v3(self, device, info):
        return self._fill(device, lambda gpu: setattr(info._obj, "busId", gpu.bus_id))

    def nvmlDeviceGetName(self, device, name, length):
        return self._fill(device, lambda gpu: setattr(name, "value", gpu.name))

    def nvmlSystemGetDriverVersion(self, version, length):
        version.value = self.driver
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUUID(self, device, uuid, length):
        return self._fill(device, lambda gpu: setattr(uuid, "value", gpu.uuid), "uuid")

    def nvmlDeviceGetMigMode(self, device, current, pending):
        return self._set(device, current, "mig")

    def nvmlDeviceGetMemoryInfo(self, device, memory):
        def fill(gpu):
            memory._obj.total = gpu.memory_total_bytes
            memory._obj.used = gpu.memory_used_bytes
            memory._obj.free = gpu.memory_total_bytes - gpu.memory_used_bytes

        return self._fill(device, fill, "memory_total_bytes")

    def nvmlDeviceGetUtilizationRates(self, device, rates):
        return self._set(device, rates, "utilization_percent", attribute="gpu")

    def nvmlDeviceGetPowerUsage(self, device, power):
        self.calls += 1
        return self._set(device, power, "power_mw")

    def nvmlDeviceGetTotalEnergyConsumption(self, device, energy):
        return self._set(device, energy, "energy_mj")

    def _set(self, device, target, field, *, attribute="value"):
        return self._fill(
            device, lambda gpu: setattr(target._obj, attribute, getattr(gpu, field)), field
        )

    def _fill(self, device, fill, field="bus_id"):
        if not self.users:
            return pynvml.NVML_ERROR_UNINITIALIZED
        gpu = self.gpus[ctypes.cast(device, ctypes.c_void_p).value - 1]
        if gpu.lost:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        if getattr(gpu, field) is None:
            return NOT_SUPPORTED
        fill(gpu)
        return pynvml.NVML_SUCCESS


def tensorflow_uses(monkeypatch, devices):
    """Lets TensorFlow use GPUs, by PCI bus id."""
    monkeypatch.setattr("kbatch.device.memory.tensorflow_gpus", lambda: devices)


def install(monkeypatch, library):
    """Lets `pynvml` load this library for the length of a test; None is a machine without one."""

    def load(name):
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    return library
