"""The machine that numbers were measured on, and what a block of work took of its GPUs."""

import dataclasses
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Literal

# No clock resolves less.
SHORTEST_S = 1e-9
# Names of the metrics of a trial that say what it took.
USAGE_METRICS = ("joules_per_sample", "gpu_power_w", "gpu_utilization")


@dataclasses.dataclass(frozen=True)
class EnvironmentRecord:
    """Where the numbers were measured."""

    # By name, of each package that matters and of Python; where TensorFlow has a GPU, of its driver
    # ("nvidia-driver"), and of the CUDA and cuDNN that TensorFlow was built with.
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
        """The devices in a few words, for a figure."""
        if self.devices != ("CPU",):
            return ", ".join(self.devices)
        return f"CPU, {self.cpu_count} cores"


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """One reading of a GPU, or the mean of several; None for what the GPU does not report."""

    time_s: float  # From the start of the block.
    # Share of the driver's last sampling window in which some process ran a kernel, from 0 to 1.
    utilization: float | None = None
    # In use or reserved, by all processes: TensorFlow reserves almost all of it at its start.
    memory_used_bytes: float | None = None
    power_w: float | None = None  # Of the board.


@dataclasses.dataclass(frozen=True)
class GpuUsage:
    """What a block of work took of one GPU."""

    name: str | None  #: Name of the product, None if the driver does not report it.
    pci_bus_id: str  #: Where it sits, as `"00000000:01:00.0"`.
    tensorflow_devices: tuple[str, ...]  #: TensorFlow's names of it, such as `("GPU:0",)`.
    memory_total_bytes: int | None  #: Its memory, in bytes, None if unknown.
    energy_j: float | None  #: Energy of the board over the block, in joules, by all processes.
    #: `"counter"` for the driver's energy counter, `"power"` for the mean power times the seconds,
    #: None where the energy is not known.
    energy_source: Literal["counter", "power"] | None
    mean: GpuSample  #: The mean of the readings; a long block keeps a part of them.
    #: The readings in order; where they were many, means of consecutive ones.
    samples: tuple[GpuSample, ...]
    #: Whether TensorFlow has an instance of the GPU (MIG): readings are of the whole board.
    mig: bool = False


@dataclasses.dataclass(frozen=True)
class UsageRecord:
    """What a block of work took of the GPUs that TensorFlow uses."""

    duration_s: float  #: Seconds of the block.
    readings: int  #: How often the GPUs were read.
    #: The GPUs in TensorFlow's order, None where none could be read.
    gpus: tuple[GpuUsage, ...] | None = None
    unavailable: str | None = None  #: Why `gpus` is None, in one line; None where it is not.

    @property
    def gpu_energy_j(self) -> float | None:
        """Energy of all GPUs in joules, None unless it is known of each."""
        return self._of_gpus(lambda gpu: gpu.energy_j, sum)

    @property
    def gpu_power_w(self) -> float | None:
        """Mean power of all GPUs together in watts, None unless it is known of each."""
        return self._of_gpus(lambda gpu: gpu.mean.power_w, sum)

    @property
    def gpu_utilization(self) -> float | None:
        """Mean utilization over the GPUs, from 0 to 1, None unless it is known of each."""
        return self._of_gpus(lambda gpu: gpu.mean.utilization, fmean)

    def _of_gpus(self, quantity: Callable[[GpuUsage], float | None], combine: Any) -> float | None:
        values = [quantity(gpu) for gpu in self.gpus or ()]
        return combine(values) if values and None not in values else None

    def joules_per_sample(self, examples: int | None) -> float | None:
        """Divide the energy of the GPUs by the examples trained on, None if not counted."""
        energy_j = self.gpu_energy_j
        return energy_j / examples if energy_j is not None and examples else None

    def metrics(self, examples: int | None) -> dict[str, float]:
        """Return the figures among the metrics of a trial that trained on so many examples."""
        figures = (self.joules_per_sample(examples), self.gpu_power_w, self.gpu_utilization)
        named = zip(USAGE_METRICS, figures, strict=True)
        return {name: value for name, value in named if value is not None}
