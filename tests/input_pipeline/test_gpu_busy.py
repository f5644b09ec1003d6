"""The GPU read over a fake NVML, the blocks by a clock that they set."""

import fake_nvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.input_pipeline.blocks import Block
from kbatch.input_pipeline.measure import LENGTH, WINDOW_S, gpu_busy

BUS_ID = "00000000:01:00.0"


class Clock:
    """A clock, and monitors that read it; only the samples that a block takes are taken."""

    def __init__(self):
        self.time_s = 0.0
        self.monitors = []

    def monitor(self):
        found = GpuMonitor(
            interval_s=1e6, now=lambda: self.time_s, find_gpus=lambda: {BUS_ID: ("GPU:0",)}
        )
        self.monitors.append(found)
        return found


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu(bus_id=BUS_ID.encode(), utilization_percent=100)
    fake_nvml.install(monkeypatch, FakeNvml(gpu))
    return gpu


def block(clock, gpu, readings, *, first_batch_s=None):
    """A block that takes a sample at each time, when the GPU shows so many percent."""

    def run(length):
        assert length == LENGTH
        for time_s, percent in readings:
            clock.time_s, gpu.utilization_percent = time_s, percent
            clock.monitors[-1].sample()
        clock.time_s = 0.0 if not readings else clock.time_s + 0.1
        return Block(8, 1.0, 1.0, first_batch_s, ())

    return run


def test_only_windows_within_the_block_count(gpu):
    clock = Clock()
    early, within = [(0.5 * WINDOW_S, 90)], [(1.1 * WINDOW_S, 20), (1.3 * WINDOW_S, 20)]
    # The reading at the end of a block is the GPU's last one.
    found = gpu_busy({"step": block(clock, gpu, early + within)}, monitor=clock.monitor)
    assert found == {"step": pytest.approx(0.2)}


def test_the_start_of_a_pipeline_is_left_out(gpu):
    clock = Clock()
    readings = [(1.5 * WINDOW_S, 0), (3.2 * WINDOW_S, 60)]
    slow_start = block(clock, gpu, readings, first_batch_s=2 * WINDOW_S)
    found = gpu_busy({"together": slow_start}, monitor=clock.monitor)
    assert found["together"] == pytest.approx(0.6)


def test_a_gpu_that_tells_no_utilization_gives_no_share(gpu):
    clock = Clock()
    found = gpu_busy({"step": block(clock, gpu, [(2.0, None)])}, monitor=clock.monitor)
    assert found == {}


def test_without_a_gpu_no_block_is_run(monkeypatch):
    fake_nvml.install(monkeypatch, None)

    def never(length):
        raise AssertionError("a block was run")

    assert gpu_busy({"step": never}) == {}


class Failing(FakeNvml):
    """A library whose readings raise from some moment on."""

    fails = False

    def nvmlDeviceGetPowerUsage(self, device, power):
        if self.fails:
            raise OSError("the library is gone")
        return super().nvmlDeviceGetPowerUsage(device, power)


def test_a_reading_that_fails_on_the_way_ends_it(monkeypatch):
    library = fake_nvml.install(monkeypatch, Failing(FakeGpu(bus_id=BUS_ID.encode())))

    def fail(length):
        library.fails = True
        return Block(8, 1.0, 1.0, None, ())

    assert gpu_busy({"step": fail, "together": fail}, monitor=Clock().monitor) == {}
