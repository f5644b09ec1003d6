import pytest

from kbatch.instruments.nvidia_check import NvidiaReading, nvidia_findings, read_nvidia

GIB = 2**30
NOTHING = NvidiaReading(False, 0, None, "NVML Shared Library Not Found")
GPU = NvidiaReading(True, 1, ((80 * GIB, GIB),), None)


def found(reading, devices=("CPU",), **variables):
    return {f.topic: f for f in nvidia_findings(reading, devices, variables=variables)}


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
    [
        GPU,
        NvidiaReading(True, 1, None, "Driver/library version mismatch"),
        NvidiaReading(False, 0, ((80 * GIB, GIB),), None),  # As under WSL.
    ],
)
def test_a_gpu_that_tensorflow_does_not_see_needs_the_libraries(reading):
    finding = found(reading)["GPU"]
    assert (finding.status, finding.command) == ("missing", "pip install 'kbatch[cuda]'")


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_gpu_is_named_hidden_and_not_missing(value):
    finding = found(GPU, CUDA_VISIBLE_DEVICES=value)["GPU"]
    assert (finding.status, finding.command) == ("warning", "unset CUDA_VISIBLE_DEVICES")
    assert found(NOTHING, CUDA_VISIBLE_DEVICES=value)["GPU"].status == "ok"
    assert found(GPU, CUDA_VISIBLE_DEVICES="0")["GPU"].status == "missing"


def test_a_driver_without_a_device_is_a_container_without_gpus():
    finding = found(NvidiaReading(True, 0, None, "not found"))["GPU"]
    assert finding.status == "warning"
    assert "--gpus" in finding.command


def test_nvml_that_fails_beside_a_gpu_is_a_warning_with_its_reason():
    reading = NvidiaReading(True, 1, None, "Driver/library version mismatch")
    finding = found(reading, ["GPU:0"])["NVML"]
    assert finding.status == "warning"
    assert "version mismatch" in finding.text


def test_memory_that_others_hold_is_told():
    reading = NvidiaReading(True, 2, ((80 * GIB, 60 * GIB), (80 * GIB, GIB)), None)
    findings = found(reading, ["GPU:0", "GPU:1"])
    assert findings["GPU 0"].status == "warning"
    assert "60.0 GiB" in findings["GPU 0"].text
    assert findings["GPU 1"].status == "ok"


def test_how_memory_is_taken_is_told_where_there_is_a_gpu():
    assert "GPU growth" not in found(NOTHING)
    assert "nearly all" in found(GPU, ["GPU:0"])["GPU growth"].text
    grown = found(GPU, ["GPU:0"], TF_FORCE_GPU_ALLOW_GROWTH="true")["GPU growth"]
    assert "as it needs it" in grown.text


def test_nvml_gives_memory_or_the_reason_here():
    reading = read_nvidia()
    assert (reading.memory_bytes is None) == (reading.nvml_error is not None)
