import fake_nvml
import pytest
from fake_nvml import FakeGpu, FakeNvml
from figure_studies import gpu_study
from records_factory import make_gpu, make_study, make_usage

import kbatch
from kbatch.study.figures.gpu_timeline import plot_gpu_timeline, watched_usage

FIRST = "00000000:01:00.0"


def panels(axes):
    return [a for a in axes.figure.axes if a.axison]


@pytest.fixture
def monitor(monkeypatch):
    """A monitor over a fake GPU that was idle and then worked."""
    library = FakeNvml(FakeGpu(utilization_percent=0, power_mw=90_000))
    fake_nvml.install(monkeypatch, library)
    times = iter(range(100))
    fake_nvml.tensorflow_uses(monkeypatch, {FIRST: ("GPU:0",)})
    with kbatch.GpuMonitor(interval_s=3600, now=lambda: next(times)) as monitor:
        library.gpus[0].utilization_percent, library.gpus[0].power_mw = 80, 400_000
        monitor.sample()
        monitor.sample()
    return monitor


def test_it_shows_what_the_monitor_read(monitor):
    axes = plot_gpu_timeline(monitor)
    utilization, memory, power = panels(axes)
    assert list(utilization.lines[0].get_ydata()) == [0, 80, 80, 80]
    assert list(power.lines[0].get_ydata()) == [90, 400, 400, 400]
    assert list(memory.lines[0].get_ydata()) == [72] * 4
    times = [sample.time_s for sample in monitor.gpus[0].samples]
    assert list(power.lines[0].get_xdata()) == times
    assert [p.get_ylabel().split("\n")[1] for p in panels(axes)] == ["(%)", "(GiB)", "(W)"]
    assert memory.get_ylim() == pytest.approx((0, 1.05 * 80))
    assert plot_gpu_timeline(monitor.usage).get_label() == axes.get_label()


def test_several_gpus_have_colours_marks_and_names():
    usage = make_usage(make_gpu(), make_gpu())
    axes = plot_gpu_timeline(usage)
    lines = axes.lines
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 2
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["Example GPU (GPU:0)"] * 2


def test_what_a_gpu_does_not_tell_has_no_panel():
    usage = make_usage(make_gpu(power_w=None, energy_j=None, energy_source=None))
    assert [p.get_ylabel().split("\n")[0] for p in panels(plot_gpu_timeline(usage))] == [
        "Utilization",
        "Memory reserved",
    ]


def test_a_study_shows_its_best_trial():
    study = gpu_study()
    best = study.best_trial().batch_size
    assert watched_usage(study)[0] == f"digits: batch size {best}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_usage(), "its library NVML was not found"),
        (make_study(), "Its trials did not watch any"),
        (kbatch.GpuMonitor(), "has not ended"),
    ],
)
def test_without_a_gpu_it_says_why(data, reason):
    with pytest.raises(ValueError, match=f"NVIDIA GPU.*no GPU was read. .*{reason}"):
        plot_gpu_timeline(data)
