"""How busy the GPU is in a block of each contender."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.input_pipeline.input_blocks import Block, BlockLength
from kbatch.records.usage import GpuSample

# NVML's utilization is that of its last sampling window, of a sixth to a whole second depending on
# the GPU (NVML API reference, nvmlUtilization_t): a block of a round is shorter.
WINDOW_S = 1.0
_READ_S = 0.5
LENGTH = BlockLength(settle_s=WINDOW_S, measure_s=_READ_S, longest_s=2 * _READ_S)


class GpuBusy(NamedTuple):
    """What the GPU did.

    Attributes:
        shares: Share of the time in which some kernel ran on the first GPU, from 0 to 1, by name
            of the contender; only of those for which it was read.
        unavailable: Why no GPU was read, None where one was.
    """

    shares: dict[str, float]
    unavailable: str | None


def gpu_busy(
    blocks: Mapping[str, Callable[[BlockLength], Block]],
    *,
    monitor: Callable[[], GpuMonitor] = GpuMonitor,
) -> GpuBusy:
    """Runs a block of each contender, longer than NVML's sampling window, and reads the GPU.

    Without a GPU that can be read no block is run.

    Args:
        blocks: What runs a block of the given length, by name of the contender.
        monitor: Makes a monitor for one block.
    """
    shares: dict[str, float] = {}
    for name, block in blocks.items():
        with monitor() as watch:
            if watch.unavailable is not None:
                return GpuBusy({}, watch.unavailable)
            start_s = block(LENGTH).first_batch_s or 0.0
        if watch.gpus is None:  # A reading failed on the way.
            return GpuBusy({}, watch.unavailable)
        share = _busy_share(watch.gpus[0].samples, from_s=start_s + WINDOW_S)
        if share is not None:
            shares[name] = share
    return GpuBusy(shares, None)


def _busy_share(samples: tuple[GpuSample, ...], *, from_s: float) -> float | None:
    """Averages the readings whose window lies within the block, past the pipeline's start."""
    read = [s.utilization for s in samples if s.time_s >= from_s and s.utilization is not None]
    return fmean(read) if read else None
