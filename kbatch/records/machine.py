"""The machine of a measurement, and the energy, power and memory that work used on its GPUs."""

import dataclasses
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Literal

# A measured duration is at least this long, because no clock resolves less.
SHORTEST_S = 1e-9
# Metrics of a trial that describe its use of GPUs.
USAGE_METRICS = ("joules_per_sample", "gpu_power_w", "gpu_utilization")
# Names of the libraries that may compute, by module.
LIBRARIES = {"tensorflow": "TensorFlow", "keras": "Keras", "onnxruntime": "ONNX Runtime"}
LIBRARIES |= {"ai_edge_litert": "LiteRT", "jax": "JAX", "torch": "PyTorch"}


@dataclasses.dataclass(frozen=True)
class EnvironmentRecord:
    """The machine and the versions of a measurement."""

    # By name: Python, libraries, and for a GPU its driver and TensorFlow's CUDA and cuDNN.
    versions: Mapping[str, str]
    platform: str  # Operating system and processor architecture.
    cpu: str
    cpu_count: int  # Processors that this process may use.
    memory_bytes: int  # Of the host.
    devices: tuple[str, ...]  # TensorFlow's, such as "GPU:0 NVIDIA H100"; "CPU" without a GPU.
    load_average: float  # Mean number of running processes over the minute before.
    command: str
    created_at: str  # Start of the study, ISO 8601 in UTC.

    @property
    def device(self) -> str:
        """A short name of the devices."""
        name = ", ".join(self.devices)
        return f"CPU, {self.cpu_count} cores" if name == "CPU" else name


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """One reading of a GPU, or the mean of several. If the GPU does not report a value, it is None.

    All values include all processes.
    """

    time_s: float  # Seconds since the block of code began.
    # Share of the driver's last sampling window in which a kernel ran, from 0 to 1.
    utilization: float | None = None
    # In use or reserved: TensorFlow reserves almost all memory when it starts.
    memory_used_bytes: float | None = None
    power_w: float | None = None  # Of the board.


@dataclasses.dataclass(frozen=True)
class GpuUsage:
    """The use of one GPU during a block of work."""

    name: str | None  #: Product name; None if the driver does not report it.
    pci_bus_id: str  #: PCI address, such as `"00000000:01:00.0"`.
    tensorflow_devices: tuple[str, ...]  #: TensorFlow's names of the GPU, such as `("GPU:0",)`.
    memory_total_bytes: int | None  #: Memory of the GPU in bytes; None if unknown.
    energy_j: float | None  #: Energy of the board in joules, all processes included.
    #: How the energy was measured: by the driver's energy `"counter"`, or as the mean `"power"`
    #: times the seconds. None if the energy is unknown.
    energy_source: Literal["counter", "power"] | None
    mean: GpuSample  #: Mean of the readings.
    #: The readings in order. If there are many, each sample is a mean of consecutive readings.
    samples: tuple[GpuSample, ...]
    #: Whether TensorFlow has an instance (MIG) of the GPU. Readings are of the whole board.
    mig: bool = False


@dataclasses.dataclass(frozen=True)
class UsageRecord:
    """The use of the GPUs of TensorFlow during a block of work."""

    duration_s: float  #: Seconds of the block.
    readings: int  #: How often the GPUs were read.
    #: The GPUs in TensorFlow's order; None if no GPU could be read.
    gpus: tuple[GpuUsage, ...] | None = None
    unavailable: str | None = None  #: Why `gpus` is None, in one line.

    @property
    def gpu_energy_j(self) -> float | None:
        """Energy of all GPUs in joules; None unless it is known of each GPU."""
        return self._of_gpus(lambda gpu: gpu.energy_j, sum)

    @property
    def gpu_power_w(self) -> float | None:
        """Mean power of all GPUs together in watts; None unless it is known of each GPU."""
        return self._of_gpus(lambda gpu: gpu.mean.power_w, sum)

    @property
    def gpu_utilization(self) -> float | None:
        """Mean utilization over the GPUs, from 0 to 1; None unless it is known of each GPU."""
        return self._of_gpus(lambda gpu: gpu.mean.utilization, fmean)

    def _of_gpus(self, quantity: Callable[[GpuUsage], float | None], combine: Any) -> float | None:
        values = [quantity(gpu) for gpu in self.gpus or ()]
        return combine(values) if values and None not in values else None

    def joules_per_sample(self, examples: int | None) -> float | None:
        """Divide the energy of the GPUs by the number of training examples."""
        energy_j = self.gpu_energy_j
        return energy_j / examples if energy_j is not None and examples else None

    def metrics(self, examples: int | None) -> dict[str, float]:
        """Return the known `USAGE_METRICS` of a trial that trained on this many examples."""
        values = (self.joules_per_sample(examples), self.gpu_power_w, self.gpu_utilization)
        return {n: v for n, v in zip(USAGE_METRICS, values, strict=True) if v is not None}
