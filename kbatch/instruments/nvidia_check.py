"""Whether an NVIDIA GPU is there, seen by TensorFlow and free."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from kbatch.instruments.nvml import NvmlUnavailableError, opened_nvml, read_gpu
from kbatch.records.examination import Finding
from kbatch.reporting.number_text import counted, gibibytes

# A share of a GPU's memory that nobody misses: a driver's context takes some hundred megabytes.
_SMALL_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class NvidiaReading:
    """What the driver shows.

    Attributes:
        driver_loaded: Whether the kernel has NVIDIA's driver.
        device_nodes: How many GPUs have a device file that a process can open.
        memory_bytes: Total and used memory of each GPU that NVML shows, None without NVML.
        nvml_error: Why NVML is not available, None if it is.
    """

    driver_loaded: bool
    device_nodes: int
    memory_bytes: tuple[tuple[int, int], ...] | None
    nvml_error: str | None

    @property
    def gpu_count(self) -> int:
        """How many GPUs this process could use."""
        return max(self.device_nodes, len(self.memory_bytes or ()))


def read_nvidia() -> NvidiaReading:
    """Reads what the driver and NVML show. Call it before TensorFlow takes the memory."""
    memory, error = _read_nvml()
    return NvidiaReading(
        driver_loaded=Path("/proc/driver/nvidia/version").exists(),
        device_nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        memory_bytes=memory,
        nvml_error=error,
    )


def _read_nvml() -> tuple[tuple[tuple[int, int], ...] | None, str | None]:
    """Reads total and used bytes of each GPU, or why NVML is not available."""
    try:
        with opened_nvml() as gpus:
            readings = [(gpu.memory_total_bytes, read_gpu(gpu).memory_used_bytes) for gpu in gpus]
    except NvmlUnavailableError as error:
        return None, str(error)
    return tuple((t, u) for t, u in readings if t is not None and u is not None), None


def nvidia_findings(
    reading: NvidiaReading, devices: Sequence[str], *, variables: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Judges the GPUs.

    Args:
        reading: What the driver shows.
        devices: TensorFlow's devices, such as `"GPU:0 NVIDIA H100"`; `"CPU"` without a GPU.
        variables: Environment variables of this process.
    """
    seen = [device for device in devices if device.startswith("GPU")]
    findings = [_gpu_finding(reading, seen, variables), _nvml_finding(reading)]
    if seen:
        findings.append(_growth_finding(variables.get("TF_FORCE_GPU_ALLOW_GROWTH", "")))
    findings.extend(
        _memory_finding(i, total, used)
        for i, (total, used) in enumerate(reading.memory_bytes or ())
    )
    return tuple(findings)


def _gpu_finding(
    reading: NvidiaReading, seen: Sequence[str], variables: Mapping[str, str]
) -> Finding:
    if seen:
        return Finding("GPU", "ok", f"TensorFlow sees {', '.join(seen)}")
    if reading.gpu_count and variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        value = variables["CUDA_VISIBLE_DEVICES"]
        text = f"CUDA_VISIBLE_DEVICES={value} hides the GPU: training runs on the CPU"
        return Finding("GPU", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    if reading.gpu_count:
        text = "an NVIDIA GPU is here and TensorFlow sees none: NVIDIA's libraries are missing"
        return Finding("GPU", "missing", text, "pip install 'kbatch[cuda]'")
    if reading.driver_loaded:
        text = "the host has NVIDIA's driver, but no GPU is handed to this container"
        return Finding("GPU", "warning", text, "docker run --gpus all IMAGE")
    return Finding("GPU", "ok", "no NVIDIA GPU: training runs on the CPU")


def _nvml_finding(reading: NvidiaReading) -> Finding:
    if reading.memory_bytes is not None:
        return Finding("NVML", "ok", f"shows {counted(len(reading.memory_bytes), 'GPU')}")
    if reading.gpu_count:
        text = f"utilisation, power and memory of the GPU cannot be read: {reading.nvml_error}"
        return Finding("NVML", "warning", text)
    return Finding("NVML", "ok", f"not available, as without a GPU ({reading.nvml_error})")


def _growth_finding(value: str) -> Finding:
    if value.lower() in ("true", "1"):
        text = f"TF_FORCE_GPU_ALLOW_GROWTH={value}: TensorFlow takes GPU memory as it needs it"
    else:
        text = (
            "TensorFlow takes nearly all GPU memory at its start; where the GPU is shared, "
            "export TF_FORCE_GPU_ALLOW_GROWTH=true"
        )
    return Finding("GPU growth", "ok", text)


def _memory_finding(index: int, total: int, used: int) -> Finding:
    topic, size = f"GPU {index}", gibibytes(total)
    if used > _SMALL_SHARE * total:
        text = f"{size}, of which other processes hold {gibibytes(used)} (nvidia-smi names them)"
        return Finding(topic, "warning", text)
    return Finding(topic, "ok", size)
