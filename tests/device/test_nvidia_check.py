import pytest

from kbatch.device.doctor import (
    ListedGpu,
    NvidiaReading,
    TensorFlowBuild,
    nvidia_findings,
    read_nvidia,
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


NOTHING = NvidiaReading(False, 0, 0, None, "NVML Shared Library Not Found")
GPU = here(gpu())


def found(reading, devices=("CPU",), build=BUILD, **variables):
    findings = nvidia_findings(reading, devices, build=build, variables=variables)
    return {finding.topic: finding for finding in findings}


def test_no_gpu_is_fine_and_is_said():
    findings = found(NOTHING)
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert "training runs on the CPU" in findings["GPU"].text
    assert "Shared Library Not Found" in findings["NVML"].text


def test_a_gpu_that_tensorflow_sees_is_fine():
    findings = found(GPU, ["GPU:0 NVIDIA H100"])
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert "GPU:0 NVIDIA H100" in findings["GPU"].text
    assert findings["GPU 0"].text == "80.0 GiB"


@pytest.mark.parametrize(
    "reading",
    [GPU, here(gpu(), driver_loaded=False, device_nodes=0)],  # The second as under WSL.
)
def test_a_gpu_that_tensorflow_does_not_see_needs_the_libraries(reading):
    finding = found(reading)["GPU"]
    assert (finding.status, finding.command) == ("missing", "pip install 'tensorflow[and-cuda]'")
    assert "nvidia-cudnn-cu12" in finding.text


def test_a_driver_that_does_not_work_is_not_taken_for_missing_libraries():
    broken = here(gpus=None, device_nodes=1, nvml_error="The driver is not loaded.")
    finding = found(broken)["GPU"]
    assert (finding.status, finding.command) == ("missing", "nvidia-smi")
    assert "because of its driver. The driver is not loaded." in finding.text


def test_a_machine_with_a_gpu_and_no_driver_is_told_to_install_one():
    finding = found(NvidiaReading(False, 0, 2, None, "not found"))["GPU"]
    assert finding.status == "warning"
    assert "2 NVIDIA GPUs in this machine" in finding.text


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_gpu_is_named_hidden_and_not_missing(value):
    finding = found(GPU, CUDA_VISIBLE_DEVICES=value)["GPU"]
    assert (finding.status, finding.command) == ("warning", "unset CUDA_VISIBLE_DEVICES")
    assert found(NOTHING, CUDA_VISIBLE_DEVICES=value)["GPU"].status == "ok"
    assert found(GPU, CUDA_VISIBLE_DEVICES="0")["GPU"].status == "missing"


def test_the_number_of_a_gpu_counts_those_that_do_not_answer():
    reading = here(gpu(1), silent_gpus=("GPU 0 (GPU is lost)",))
    assert "names no GPU" not in found(reading, CUDA_VISIBLE_DEVICES="1")["GPU"].text
    assert "names no GPU" in found(reading, CUDA_VISIBLE_DEVICES="2")["GPU"].text


def test_a_driver_without_a_device_is_a_container_without_gpus():
    finding = found(NvidiaReading(True, 0, 1, None, "not found"))["GPU"]
    assert finding.status == "warning"
    assert "--gpus" in finding.command


def test_nvml_that_fails_beside_a_gpu_is_a_warning_with_its_reason():
    reading = NvidiaReading(True, 1, 1, None, "Driver/library version mismatch")
    finding = found(reading, ["GPU:0"])["NVML"]
    assert finding.status == "warning"
    assert "version mismatch" in finding.text


def test_memory_that_others_hold_is_told():
    reading = here(gpu(used=60 * GIB), gpu(1))
    findings = found(reading, ["GPU:0", "GPU:1"])
    assert findings["GPU 0"].status == "warning"
    assert "60.0 GiB" in findings["GPU 0"].text
    assert findings["GPU 1"].status == "ok"


def test_memory_of_other_instances_is_in_nobodys_way():
    finding = found(here(gpu(used=60 * GIB, mig=True)), ["GPU:0"])["GPU 0"]
    assert finding.status == "ok"
    assert "whole board" in finding.text


def test_how_memory_is_taken_is_told_where_there_is_a_gpu():
    assert "GPU growth" not in found(NOTHING)
    assert "nearly all" in found(GPU, ["GPU:0"])["GPU growth"].text
    grown = found(GPU, ["GPU:0"], TF_FORCE_GPU_ALLOW_GROWTH="true")["GPU growth"]
    assert "as it needs it" in grown.text


def test_nvml_gives_memory_or_the_reason_here():
    reading = read_nvidia()
    assert (reading.gpus is None) == (reading.nvml_error is not None)


def test_who_holds_the_memory_of_a_gpu_is_named():
    process = GpuProcess(4711, 30 * GIB, "python")
    held = gpu(used=40 * GIB)._replace(processes=(process,))
    assert "hold 40.0 GiB: process 4711 (python) 30.0 GiB" in found(here(held))["GPU 0"].text
    unnamed = found(here(gpu(used=40 * GIB)))["GPU 0"].text
    assert "hold 40.0 GiB: nvidia-smi on the host names them" in unnamed
