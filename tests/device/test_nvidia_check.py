import pytest

from kbatch.device.doctor import (
    ListedGpu,
    NvidiaReading,
    TensorFlowBuild,
    nvidia_findings,
)
from kbatch.device.gpus import NvmlGpu
from kbatch.records.usage import GpuProcess

GIB = 2**30
BUILD = TensorFlowBuild((12, 5), ((6, 0), (9, 0)), ("nvidia-cudnn-cu12",))


def gpu(index=0, *, used=GIB, mig=False):
    known = NvmlGpu(None, "Example GPU", "00000000:01:00.0", 80 * GIB, index=index, mig=mig)
    return ListedGpu(known, used)


def here(*gpus, **changes):
    """A reading of GPUs with a driver that works, but for the changes."""
    usual = {
        "driver_loaded": True,
        "device_nodes": len(gpus),
        "pci_gpus": len(gpus),
        "gpus": gpus,
        "nvml_error": None,
        "driver_version": "550.54.15",
        "cuda_version": (12, 4),
    }
    return NvidiaReading(**usual | changes)


NVML_FAILS = NvidiaReading(True, 1, 1, None, "Driver/library version mismatch")
NO_DRIVER = NvidiaReading(False, 0, 2, None, "not found")
NO_DEVICE = NvidiaReading(True, 0, 1, None, "not found")
UNSET = "unset CUDA_VISIBLE_DEVICES"
NOTHING = NvidiaReading(False, 0, 0, None, "NVML Shared Library Not Found")
GPU = here(gpu())


def found(reading, devices=("CPU",), build=BUILD, **variables):
    findings = nvidia_findings(reading, devices, build=build, variables=variables)
    return {finding.topic: finding for finding in findings}


INSTALL = "pip install 'tensorflow[and-cuda]'"
SEEN = ("GPU:0 NVIDIA H100",)
BROKEN = here(gpus=None, device_nodes=1, nvml_error="The driver is not loaded.")
FIRST_IS_LOST = here(gpu(1), silent_gpus=("GPU 0 (GPU is lost)",))
HELD = here(gpu(used=40 * GIB)._replace(processes=(GpuProcess(4711, 30 * GIB, "python"),)))


@pytest.mark.parametrize(
    ("reading", "devices", "variables", "topic", "status", "words", "command"),
    [
        (NOTHING, (), {}, "GPU", "ok", "training runs on the CPU", None),
        (NOTHING, (), {}, "NVML", "ok", "Shared Library Not Found", None),
        (NOTHING, (), {"CUDA_VISIBLE_DEVICES": "-1"}, "GPU", "ok", "", None),
        (GPU, SEEN, {}, "GPU", "ok", "GPU:0 NVIDIA H100", None),
        (GPU, SEEN, {}, "GPU 0", "ok", "80.0 GiB", None),
        (GPU, (), {}, "GPU", "missing", "nvidia-cudnn-cu12", INSTALL),
        (GPU, (), {"CUDA_VISIBLE_DEVICES": "0"}, "GPU", "missing", "nvidia-cudnn-cu12", INSTALL),
        # As under WSL.
        (here(gpu(), driver_loaded=False, device_nodes=0), (), {}, "GPU", "missing", "", INSTALL),
        (BROKEN, (), {}, "GPU", "missing", "because of its driver", "nvidia-smi"),
        (NVML_FAILS, SEEN, {}, "NVML", "warning", "version mismatch", None),
        # A machine with GPUs and no driver, and a container without them.
        (NO_DRIVER, (), {}, "GPU", "warning", "2 NVIDIA GPUs in this machine", ...),
        (NO_DEVICE, (), {}, "GPU", "warning", "", "docker run --gpus all IMAGE"),
        *(
            (GPU, (), {"CUDA_VISIBLE_DEVICES": value}, "GPU", "warning", "", UNSET)
            for value in ("", "-1")
        ),
        # The number of a GPU counts those that do not answer.
        (FIRST_IS_LOST, (), {"CUDA_VISIBLE_DEVICES": "2"}, "GPU", "warning", "names no GPU", UNSET),
        (FIRST_IS_LOST, (), {"CUDA_VISIBLE_DEVICES": "1"}, "GPU", "missing", "", INSTALL),
        (HELD, SEEN, {}, "GPU 0", "warning", "40.0 GiB: process 4711 (python) 30.0 GiB", ...),
        (here(gpu(used=40 * GIB)), SEEN, {}, "GPU 0", "warning", "nvidia-smi on the host", ...),
        (here(gpu(used=60 * GIB, mig=True)), SEEN, {}, "GPU 0", "ok", "whole board", None),
        (GPU, SEEN, {}, "GPU growth", "ok", "nearly all", None),
        (GPU, SEEN, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, "GPU growth", "ok", "as it needs", None),
    ],
)
def test_each_cause_has_its_finding(reading, devices, variables, topic, status, words, command):
    finding = found(reading, devices or ("CPU",), **variables)[topic]
    assert finding.status == status
    assert words in finding.text
    assert command is ... or finding.command == command


def test_how_memory_is_taken_is_told_where_there_is_a_gpu():
    assert "GPU growth" not in found(NOTHING)
