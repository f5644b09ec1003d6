import dataclasses

import pytest
from figure_samples import panels
from figure_studies import gpu_study
from records_factory import make_gpu, make_study, make_trial, make_usage

import kbatch
from kbatch.records.machine import GpuSample
from kbatch.study.figures.timelines import plot_gpu_timeline, watched_usage


def test_plot_gpu_timeline_shows_readings():
    (gpu,) = (usage := make_usage(make_gpu())).gpus
    worked = dataclasses.replace(gpu.samples[-1], utilization=0.9, power_w=400.0)
    gpu = dataclasses.replace(gpu, samples=(*gpu.samples[:-1], worked))
    axes = plot_gpu_timeline(dataclasses.replace(usage, gpus=(gpu,)))
    utilization, memory, power = panels(axes)
    assert list(utilization.lines[0].get_ydata()) == pytest.approx([80, 80, 80, 90])
    assert list(power.lines[0].get_ydata()) == [300, 300, 300, 400]
    assert list(memory.lines[0].get_ydata()) == pytest.approx([2e9 / 2**30] * 4)
    assert list(power.lines[0].get_xdata()) == [sample.time_s for sample in gpu.samples]
    assert [p.get_ylabel().split("\n")[1] for p in panels(axes)] == ["(%)", "(GiB)", "(W)"]
    assert memory.get_ylim() == pytest.approx((0, 1.05 * 80))


def test_plot_gpu_timeline_of_several_gpus():
    axes = plot_gpu_timeline(make_usage(make_gpu(), make_gpu()))
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 2
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["Example GPU (GPU:0)"] * 2


def test_plot_gpu_timeline_of_study_shows_answer():
    study = gpu_study()
    named = study.decide().batch_size
    assert watched_usage(study)[0] == f"GPUs during the trial of batch size {named}"
    silent = make_trial(128, accuracies=(1.0,), usage=make_usage(SILENT))
    label = plot_gpu_timeline(make_study(silent, *study.trials)).get_label()
    assert "Batch size 128 has no timeline. The GPU gave no readings." in label


SILENT = dataclasses.replace(make_gpu(), samples=(GpuSample(0.0, None, None, None),))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_usage(), "its library NVML was not found"),
        (make_study(), "No GPU was monitored"),
        (kbatch.GpuMonitor(), "still running"),
        (make_usage(SILENT), "gave no readings"),
        (make_study(make_trial(64, usage=make_usage(SILENT))), "gave no readings"),
    ],
)
def test_plot_gpu_timeline_without_readings(data, reason):
    with pytest.raises(ValueError, match=f"NVIDIA GPU.*Received: .*{reason}"):
        plot_gpu_timeline(data)
