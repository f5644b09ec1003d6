"""The GPU read over a fake NVML, the blocks by a clock that they set."""

import fake_nvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.input_pipeline.blocks import Block, BlockLength
from kbatch.input_pipeline.measure import WINDOW_S, gpu_busy

BUS_ID = "00000000:01:00.0"
LENGTH = BlockLength(0.0, 1.0, 1.0)


class Clock:
    """A clock, and monitors that read it; only the samples that a block takes are taken."""

    def __init__(self):
        self.time_s = 0.0
        self.monitors = []

    def monitor(self):
        found = GpuMonitor(interval_s=1e6, now=lambda: self.time_s)
        self.monitors.append(found)
        return found


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu(bus_id=BUS_ID.encode(), utilization_percent=100)
    fake_nvml.install(monkeypatch, FakeNvml(gpu))
    fake_nvml.tensorflow_uses(monkeypatch, {BUS_ID: ("GPU:0",)})
    return gpu


def watched(clock, gpu, readings, *, first_batch_s=None):
    """The share read beside a block that takes a sample at each time, of so many percent."""

    def train(length):
        assert length.measure_s >= 1.5 * WINDOW_S
        for time_s, percent in readings:
            clock.time_s, gpu.utilization_percent = time_s, percent
            clock.monitors[-1].sample()
        clock.time_s += 0.1
        return Block(8, 1.0, 1.0, first_batch_s)

    block, busy = gpu_busy(train, LENGTH, monitor=clock.monitor)
    assert block.examples == 8
    return busy


def test_only_windows_within_the_block_after_the_start_of_the_pipeline_count(gpu):
    readings = [(0.5 * WINDOW_S, 90), (1.1 * WINDOW_S, 20), (1.3 * WINDOW_S, 20)]
    # The reading at the end of a block is the GPU's last one.
    assert watched(Clock(), gpu, readings) == pytest.approx(0.2)
    readings = [(1.5 * WINDOW_S, 0), (3.2 * WINDOW_S, 60)]
    busy = watched(Clock(), gpu, readings, first_batch_s=2 * WINDOW_S)
    assert busy == pytest.approx(0.6)


def test_without_a_gpu_the_block_is_as_long_as_asked(monkeypatch):
    fake_nvml.install(monkeypatch, None)
    lengths = []
    block, busy = gpu_busy(lambda length: lengths.append(length) or Block(8, 1.0, 1.0), LENGTH)
    assert (block.examples, busy, lengths) == (8, None, [LENGTH])
