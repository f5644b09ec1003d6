import itertools
import threading
import tracemalloc

import fake_nvml
import numpy as np
import pytest
from fake_clock import FakeClock
from fake_nvml import FakeGpu, FakeNvml

import kbatch

FIRST, SECOND = "00000000:01:00.0", "00000000:c1:00.0"
NEVER_S = 3600.0


@pytest.fixture
def clock():
    return FakeClock()


def monitor_of(monkeypatch, library, clock, *, devices=None, interval_s=NEVER_S):
    """Return a monitor of a fake library, whose thread takes no samples."""
    fake_nvml.install(monkeypatch, library)
    devices = {FIRST: ("GPU:0",)} if devices is None else devices
    fake_nvml.tensorflow_uses(monkeypatch, devices)
    return kbatch.GpuMonitor(interval_s=interval_s, now=clock)


def play(monitor, clock, library, steps):
    """Take a sample after each step of seconds, with new readings of the first GPU."""
    for seconds, readings in steps:
        clock.sleep(seconds)
        for field, value in readings.items():
            setattr(library.gpus[0], field, value)
        monitor.sample()


def test_gpu_monitor_energy_of_several_gpus(monkeypatch, clock):
    library = FakeNvml(
        FakeGpu(energy_step_mj=5_000), FakeGpu(bus_id=b"0000:C1:00.0", energy_step_mj=7_000)
    )
    devices = {SECOND: ("GPU:0",), FIRST: ("GPU:1",)}
    with monitor_of(monkeypatch, library, clock, devices=devices) as monitor:
        play(monitor, clock, library, [(1.0, {})])
    usages = [(gpu.tensorflow_devices, gpu.energy_j, gpu.energy_source) for gpu in monitor.gpus]
    assert usages == [(("GPU:0",), 14.0, "counter"), (("GPU:1",), 10.0, "counter")]
    assert monitor.usage.joules_per_sample(10) == 2.4
    assert "energy 14.0 J (driver's counter)" in timeline(monitor)[1]
    assert list(monitor.to_dataframe()["gpu"]) == ["GPU:0"] * 3 + ["GPU:1"] * 3


def test_gpu_monitor_counter_that_was_reset(monkeypatch, clock):
    library = FakeNvml(FakeGpu())
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(1, {}), (1, {"energy_mj": 500}), (1, {"energy_mj": 2**33})])
    (gpu,) = monitor.gpus
    assert (gpu.energy_j, gpu.energy_source) == (900, "power")


def test_gpu_monitor_gpu_that_disappears(monkeypatch, clock):
    library = FakeNvml(FakeGpu(), FakeGpu(bus_id=SECOND.encode()))
    devices = {FIRST: ("GPU:0",), SECOND: ("GPU:1",)}
    with monitor_of(monkeypatch, library, clock, devices=devices) as monitor:
        play(monitor, clock, library, [(1.0, {}), (1.0, {"lost": True}), (1.0, {})])
    assert [gpu.energy_source for gpu in monitor.gpus] == [None, "counter"]
    assert monitor.usage.joules_per_sample(10) is None
    assert timeline(monitor)[1].count("no answer after 1.00 s") == 1


@pytest.mark.parametrize(
    ("gpu", "panels"),
    [
        (
            {"utilization_percent": None, "power_mw": None, "energy_mj": None},
            ["Memory reserved\n(GiB)"],
        ),
        ({"mig": 1, "utilization_percent": None}, ["Memory reserved\n(GiB)", "Power\n(W)"]),
        ({"memory_total_bytes": None}, ["Utilization\n(%)", "Power\n(W)"]),
    ],
    ids=["old", "instance", "unified memory"],
)
def test_gpu_monitor_unsupported_readings_have_no_panel(monkeypatch, clock, gpu, panels):
    library = FakeNvml(FakeGpu(**gpu))
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(1.0, {})])
    labels, text = timeline(monitor)
    assert labels == panels
    assert ("(MIG): readings are of the whole GPU" in text) == ("mig" in gpu)


def timeline(monitor):
    """Return the labels of the panels and the description of the figure."""
    axes = kbatch.plot_gpu_timeline(monitor)
    return [panel.get_ylabel() for panel in axes.figure.axes], axes.get_label()


def sampling_threads():
    return [t for t in threading.enumerate() if t.name == "kbatch-sampling"]


def test_gpu_monitor_energy_from_power(monkeypatch, clock):
    library = FakeNvml(FakeGpu(energy_mj=None, power_mw=100_000))
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(1.0, {"power_mw": 300_000}), (2.0, {"power_mw": 500_000})])
    (gpu,) = monitor.gpus
    assert (gpu.energy_j, gpu.energy_source) == (3 * 350, "power")


def test_gpu_monitor_samples(monkeypatch, clock):
    library = FakeNvml(FakeGpu(utilization_percent=10))
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(0.5, {"utilization_percent": 90})])
        clock.sleep(0.25)
    (gpu,) = monitor.gpus
    assert [s.time_s for s in gpu.samples] == [0.0, 0.5, 0.75]
    assert [s.utilization for s in gpu.samples] == [0.1, 0.9, 0.9]
    assert (monitor.usage.duration_s, monitor.usage.readings) == (0.75, 3)
    assert monitor.usage.gpu_utilization == pytest.approx(1.9 / 3)


def test_gpu_monitor_long_block_has_100_samples(monkeypatch, clock):
    library = FakeNvml(FakeGpu())
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(0.1, {"power_mw": 1000 * n}) for n in range(1000)])
    (gpu,) = monitor.gpus
    assert monitor.usage.readings == 1002
    assert len(gpu.samples) == 100
    # Each sample is the mean of eleven readings, or ten at the end. The first one is at 0 s.
    assert gpu.samples[1].power_w == pytest.approx(np.mean(range(10, 21)))
    assert gpu.samples[-1].time_s == pytest.approx(99.64, abs=1e-3)
    assert monitor.usage.gpu_energy_j == 0


def test_gpu_monitor_long_block_bounded_memory(monkeypatch, clock):
    library = FakeNvml(FakeGpu(energy_step_mj=1))
    with monitor_of(monkeypatch, library, clock) as monitor:
        tracemalloc.start()  # Here, since entering the block may import TensorFlow.
        try:
            play(monitor, clock, library, ((0.1, {"power_mw": 10 * n}) for n in range(17_000)))
            traced_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert traced_bytes < 16_384 * 40  # All readings would need 680,000.
    (gpu,) = monitor.gpus
    assert (monitor.usage.readings, monitor.usage.duration_s) == (17_002, pytest.approx(1700))
    # The remaining readings are spread over the whole block.
    times_s = [sample.time_s for sample in gpu.samples]
    assert times_s == sorted(times_s)
    first, last = gpu.samples[0], gpu.samples[-1]
    assert (first.power_w, last.power_w) == (pytest.approx(1, abs=4), pytest.approx(169, abs=4))
    assert gpu.energy_source == "counter"


def test_gpu_monitor_failed_reading(monkeypatch, clock):
    library = FakeNvml(FakeGpu(energy_mj=None, power_mw=200_000))
    with monitor_of(monkeypatch, library, clock) as monitor:
        play(monitor, clock, library, [(1.0, {"lost": True}), (1.0, {"lost": False})])
    (gpu,) = monitor.gpus
    assert [s.power_w for s in gpu.samples] == [200, None, 200, 200]
    assert (gpu.mean.power_w, gpu.energy_j) == (200, 400)


@pytest.mark.parametrize(
    ("library", "devices", "reason"),
    [
        (None, {FIRST: ("GPU:0",)}, "There is no NVIDIA driver"),
        (FakeNvml(), {}, "TensorFlow uses no GPU; NVML lists no GPU"),
        (FakeNvml(FakeGpu()), {}, f"TensorFlow uses no GPU; NVML lists {FIRST}"),
        (FakeNvml(FakeGpu()), {SECOND: ("GPU:0",)}, f"GPU {SECOND}, but NVML lists {FIRST}"),
    ],
)
def test_gpu_monitor_unavailable(monkeypatch, clock, library, devices, reason):
    with monitor_of(monkeypatch, library, clock, devices=devices) as monitor:
        assert reason in monitor.unavailable
        clock.sleep(1.0)
    assert monitor.gpus is None
    assert monitor.usage.unavailable == monitor.unavailable
    assert len(monitor.unavailable.splitlines()) == 1
    assert monitor.usage.metrics(100) == {}
    assert library is None or library.users == 0


def test_gpu_monitor_exception_in_the_block(monkeypatch, clock):
    library = FakeNvml(FakeGpu())
    monitor = monitor_of(monkeypatch, library, clock)
    with pytest.raises(KeyboardInterrupt), monitor:
        clock.sleep(2.0)
        raise KeyboardInterrupt
    assert library.users == 0
    assert sampling_threads() == []
    assert monitor.usage.duration_s == 2.0


def test_gpu_monitor_used_too_early_or_twice(monkeypatch, clock):
    monitor = monitor_of(monkeypatch, FakeNvml(FakeGpu()), clock)
    assert (monitor.usage, monitor.gpus) == (None, None)
    with pytest.raises(RuntimeError, match="inside `with monitor:`"):
        monitor.sample()
    with monitor, pytest.raises(RuntimeError, match="after the `with` block"):
        monitor.to_dataframe()
    with pytest.raises(RuntimeError, match="create a new"), monitor:
        pass


@pytest.mark.parametrize("interval_s", [0, -1, float("nan")])
def test_gpu_monitor_invalid_interval(interval_s):
    with pytest.raises(ValueError, match=f"positive.*Received: interval_s={interval_s}"):
        kbatch.GpuMonitor(interval_s=interval_s)


def test_gpu_monitor_thread_samples(monkeypatch):
    library = FakeNvml(FakeGpu())
    reached = threading.Event()
    ticks = itertools.count()

    def clock():
        tick = next(ticks)
        if tick >= 20:
            reached.set()
        return float(tick)

    with monitor_of(monkeypatch, library, clock, interval_s=1e-4) as monitor:
        assert len(sampling_threads()) == 1
        assert reached.wait(600)
    assert sampling_threads() == []
    assert library.calls == monitor.usage.readings >= 20
