"""The record of what a block of work took of the GPUs and of the host."""

import dataclasses
from collections.abc import Iterable
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ENERGY_SOURCES = ("counter", "power")
# Names under which a trial's metrics hold it.
USAGE_METRICS = ("joules_per_sample", "gpu_power_w", "gpu_utilization")


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """One reading of a GPU, or the mean of several; None for what the GPU does not tell.

    Attributes:
        time_s: When it was read, in seconds from the start of the block.
        utilization: Share of the driver's last sampling window in which some kernel ran, of this
            or of another process, from 0 to 1.
        memory_used_bytes: Memory in use or reserved, by all processes. TensorFlow reserves
            almost all of it at its start: this is no measure of need. Where the `memory_source`
            is TensorFlow, what its tensors hold.
        power_w: Power of the board, in watts.
        temperature_c: Temperature of the chip, in degrees Celsius.
        sm_clock_mhz: Clock of the multiprocessors, in MHz.
        memory_clock_mhz: Clock of the memory, in MHz.
    """

    time_s: float
    utilization: float | None = None
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None


@dataclasses.dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        pid: Its number, that of the host: within a container it may be another one's.
        memory_bytes: What it holds, None if the driver does not tell.
        name: Its program, None where that cannot be seen.
    """

    pid: int
    memory_bytes: int | None
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class GpuUsage:
    """What a block of work took of one GPU.

    Attributes:
        name: Name of the product, None if the driver does not tell.
        pci_bus_id: Where it sits, as `"00000000:01:00.0"`.
        tensorflow_devices: TensorFlow's names of it, such as `("GPU:0",)`.
        memory_total_bytes: Its memory, in bytes, None if unknown.
        energy_j: Energy of the board over the block, in joules, by all processes.
        energy_source: `"counter"` for the driver's energy counter, `"power"` for the integral of
            the power readings, None where the energy is not known.
        mean: The mean of all readings.
        samples: The readings in order; where they were many, means of consecutive ones.
        power_cap_w: Power that the driver lets the board take, in watts, None if not told.
        throttle_reasons: What lowered the clocks in some reading, such as `("power cap",)`; None
            if not told.
        memory_source: `"driver"`, or `"tensorflow"` where the driver does not show the memory
            that TensorFlow may take: on an instance of a GPU (MIG), and where GPU and host share
            one memory.
        mig: Whether TensorFlow has an instance of the GPU: all but the memory is then of the
            whole board.
        uuid: Name of the board in `nvidia-smi -L`, also where TensorFlow has an instance of it;
            None if the driver does not tell.
    """

    name: str | None
    pci_bus_id: str
    tensorflow_devices: tuple[str, ...]
    memory_total_bytes: int | None
    energy_j: float | None
    energy_source: str | None
    mean: GpuSample
    samples: tuple[GpuSample, ...]
    power_cap_w: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    memory_source: str = "driver"
    mig: bool = False
    uuid: str | None = None

    def __post_init__(self):
        if (self.energy_j is None) != (self.energy_source not in ENERGY_SOURCES):
            raise ValueError(
                f"`energy_source` must be one of {ENERGY_SOURCES} where there is an energy, else "
                f"None. Received: {self.energy_source!r} with energy_j={self.energy_j}."
            )

    @property
    def sm_clocks_mhz(self) -> tuple[float, float, float] | None:
        """Clock of the multiprocessors at the start, its median and at the end, None if not told.

        The median is that of the samples in which some kernel ran, where there are such.
        """
        clocks = [s.sm_clock_mhz for s in self.samples if s.sm_clock_mhz is not None]
        busy = [s.sm_clock_mhz for s in self.samples if s.sm_clock_mhz and s.utilization != 0]
        if not clocks:
            return None
        return clocks[0], median(busy or clocks), clocks[-1]


@dataclasses.dataclass(frozen=True)
class HostSample:
    """One reading of this process on its host, or the mean of several.

    Attributes:
        time_s: When it was read, in seconds from the start of the block.
        cpu_cores_busy: Processor seconds a second since the reading before, of all threads; 1 is
            one core. None for the first.
        resident_bytes: Memory of the process that is in RAM, in bytes.
    """

    time_s: float
    cpu_cores_busy: float | None = None
    resident_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class HostUsage:
    """What a block of work took of the host, in its own process, without child processes.

    Attributes:
        cpu_s: Processor seconds, of all threads, None where the system does not tell.
        mean: The mean of all readings.
        samples: The readings, in step with those of the GPUs.
    """

    cpu_s: float | None
    mean: HostSample
    samples: tuple[HostSample, ...]


@dataclasses.dataclass(frozen=True)
class UsageRecord:
    """What a block of work took of the GPUs that TensorFlow uses, and of the host.

    Attributes:
        duration_s: Seconds of the block.
        readings: How often the GPUs and the host were read.
        host: The host.
        gpus: The GPUs in TensorFlow's order, None where none could be read.
        unavailable: Why `gpus` is None, in one line; None where it is not.
    """

    duration_s: float
    readings: int
    host: HostUsage
    gpus: tuple[GpuUsage, ...] | None = None
    unavailable: str | None = None

    def __post_init__(self):
        if (self.gpus is None) != bool(self.unavailable):
            raise ValueError(
                "`unavailable` says why `gpus` is None, and is None where there are GPUs. "
                f"Received: unavailable={self.unavailable!r}, gpus={self.gpus}."
            )

    @property
    def gpu_energy_j(self) -> float | None:
        """Energy of all GPUs in joules, None unless it is known of each."""
        energies = _all_known(gpu.energy_j for gpu in self.gpus or ())
        return sum(energies) if energies else None

    @property
    def gpu_power_w(self) -> float | None:
        """Mean power of all GPUs together in watts, None unless it is known of each."""
        powers = _all_known(gpu.mean.power_w for gpu in self.gpus or ())
        return sum(powers) if powers else None

    @property
    def sm_clock_mhz(self) -> float | None:
        """Median clock of the slowest GPU in MHz, for which the others wait; None if unknown."""
        clocks = [gpu.sm_clocks_mhz for gpu in self.gpus or ()]
        return min((found[1] for found in clocks if found is not None), default=None)

    @property
    def gpu_utilization(self) -> float | None:
        """Mean utilization over the GPUs, from 0 to 1, None unless it is known of each."""
        shares = _all_known(gpu.mean.utilization for gpu in self.gpus or ())
        return fmean(shares) if shares else None

    @property
    def cpu_cores_busy(self) -> float | None:
        """Processor seconds a second: 1 is one core."""
        if self.host.cpu_s is None or not self.duration_s:
            return None
        return self.host.cpu_s / self.duration_s

    @property
    def resident_bytes(self) -> float | None:
        """Mean memory of the process in RAM, in bytes."""
        return self.host.mean.resident_bytes

    def joules_per_sample(self, examples: int | None) -> float | None:
        """Divide the energy of the GPUs by the examples trained on.

        Args:
            examples: How many examples, None if they were not counted.
        """
        energy_j = self.gpu_energy_j
        return energy_j / examples if energy_j is not None and examples else None

    def metrics(self, examples: int | None) -> dict[str, float]:
        """Return the figures that stand among the metrics of a trial, those that are known.

        Args:
            examples: How many examples were trained on, None if they were not counted.
        """
        figures = (self.joules_per_sample(examples), self.gpu_power_w, self.gpu_utilization)
        named = zip(USAGE_METRICS, figures, strict=True)
        return {name: value for name, value in named if value is not None}

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table of the samples, one row a sample and GPU; without GPUs one a sample.

        Returns:
            The columns are `gpu` (TensorFlow's name) and those of `GpuSample`, where there are
            GPUs, and those of `HostSample`.
        """
        import pandas as pd

        hosts = [dataclasses.asdict(sample) for sample in self.host.samples]
        if self.gpus is None:
            return pd.DataFrame(hosts)
        return pd.DataFrame(
            {"gpu": ", ".join(gpu.tensorflow_devices), **dataclasses.asdict(sample), **host}
            for gpu in self.gpus
            for sample, host in zip(gpu.samples, hosts, strict=True)
        )


def median_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known, None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _all_known(values: Iterable[float | None]) -> list[float]:
    """Return the values, none of them where one is missing: a part is not the whole."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return known if len(known) == len(listed) else []
