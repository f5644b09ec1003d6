"""Programs over the stub of NVIDIA's library, run in one process; prints what each found.

The loader finds the stub as it would find the library, so that everything from `pynvml` up is real.
"""

import ctypes
import json
import sys
import types

import pynvml

import kbatch
from kbatch.cli.doctor import gpu_findings

GIB = 2**30


class Gpu(ctypes.Structure):
    """As in nvml_stub.c."""

    _fields_ = (
        *((name, ctypes.c_char * size) for name, size in (("bus_id", 32), ("name", 96))),
        ("uuid", ctypes.c_char * 96),
        *((name, ctypes.c_int) for name in ("error", "mig")),
        *((name, ctypes.c_longlong) for name in ("total", "used", "utilization")),
        ("power_mw", ctypes.c_longlong),
        *((name, ctypes.c_longlong) for name in ("energy_mj", "energy_step_mj")),
    )


stub = ctypes.CDLL("libnvidia-ml.so.1")
gpus = (Gpu * 8).in_dll(stub, "gpus")


def install(*changes):
    """Puts GPUs into the stub, each like the first but for its changes."""
    for index, changed in enumerate(changes):
        usual = {
            "bus_id": f"00000000:{index + 1:02X}:00.0".encode(),
            "name": b"Stub H100",
            "uuid": f"GPU-{index}000".encode(),
            "mig": -1,
            "total": 80 * GIB,
            "used": GIB,
            "utilization": 50,
            "power_mw": 300_000,
            "energy_mj": 1_000,
            "energy_step_mj": 5_000,
        }
        gpus[index] = Gpu(**usual | changed)
    ctypes.c_int.in_dll(stub, "gpu_count").value = len(changes)


def watch(*steps, devices=None):
    """Watches the GPUs for a second a step; a step changes a GPU, by its index."""
    names = devices or {"00000000:01:00.0": ("GPU:0",)}
    time_s = [0.0]
    # In place of the module that asks TensorFlow.
    sys.modules["kbatch.device.memory"] = types.SimpleNamespace(tensorflow_gpus=lambda: names)
    with kbatch.GpuMonitor(interval_s=3600, now=lambda: time_s[0]) as monitor:
        for step in steps:
            for index, changed in step.items():
                for field, value in changed.items():
                    setattr(gpus[index], field, value)
            time_s[0] += 1.0
            monitor.sample()
    usage = monitor.usage
    found = {
        "unavailable": usage.unavailable,
        "joules_per_sample": usage.joules_per_sample(10),
        "gpus": [
            {
                "name": gpu.name,
                "devices": gpu.tensorflow_devices,
                "energy": [gpu.energy_j, gpu.energy_source],
                "memory": [gpu.memory_total_bytes, gpu.mean.memory_used_bytes],
                "mean": list(vars(gpu.mean).values())[1:],
            }
            for gpu in usage.gpus or ()
        ],
    }
    if usage.gpus:
        axes = kbatch.plot_gpu_timeline(monitor)
        found["panels"] = [panel.get_ylabel() for panel in axes.figure.axes]
        found["timeline"] = axes.get_label()
    return found


def doctor(devices=("CPU",), **variables):
    """What `kbatch doctor` says of the GPUs, by topic."""
    findings = gpu_findings(lambda: devices, variables)
    return {one.topic: [one.status, one.text, one.command] for one in findings}


def run():
    found = {}
    install({}, {"name": b"Stub A100", "energy_step_mj": 7_000}, {})
    devices = {"00000000:02:00.0": ("GPU:0",), "00000000:01:00.0": ("GPU:1",)}
    found["several GPUs"] = watch({}, devices=devices)

    install(dict.fromkeys(("utilization", "power_mw", "energy_mj"), -1))
    found["unsupported readings"] = watch({})

    install({"energy_mj": 2**32 - 2_000, "energy_step_mj": 1_000})
    found["a counter that wraps"] = watch({}, {0: {"energy_mj": 500}}, {0: {"energy_mj": 2**33}})

    install({}, {})
    lost = {1: {"error": pynvml.NVML_ERROR_GPU_IS_LOST}}
    devices = {"00000000:01:00.0": ("GPU:0",), "00000000:02:00.0": ("GPU:1",)}
    found["a GPU that disappears"] = watch({}, lost, {}, devices=devices)
    found["doctor: a GPU is lost"] = doctor(["GPU:0 Stub H100"])
    install({"error": pynvml.NVML_ERROR_GPU_IS_LOST})
    found["doctor: the GPU is lost"] = doctor()

    install({"mig": 1, "utilization": -1}, {})
    found["an instance"] = watch({})
    found["doctor: an instance"] = doctor(["GPU:0 Stub H100 MIG 1g.10gb"])

    install({"total": -1, "name": b"Stub GB10"})
    found["unified memory"] = watch({})
    found["doctor: unified memory"] = doctor(["GPU:0 Stub GB10"])

    install({"used": 61 * GIB})
    found["doctor: a GPU in use"] = doctor(["GPU:0 Stub H100"])
    found["doctor: hidden"] = doctor(CUDA_VISIBLE_DEVICES="-1")
    found["doctor: not seen"] = doctor()

    found["users"] = ctypes.c_int.in_dll(stub, "users").value
    found["tensorflow"] = "tensorflow" in sys.modules
    return found


if __name__ == "__main__":
    print(json.dumps(run()))
