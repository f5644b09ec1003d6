import math

import pytest
from figure_studies import learned, learned_study, step_time_s
from records_factory import make_study, make_trial

from kbatch.analysis.goodput import best_batch_size, best_measured_batch_size, goodput
from kbatch.document.numbers import in_brackets
from kbatch.study.figures.goodput import goodput_info, plot_goodput


def texts(panel):
    return " ".join(text.get_text().replace("\n", " ") for text in panel.texts).replace("\xa0", " ")


def test_goodput_is_that_of_the_analysis_in_samples_of_the_smallest_size():
    study = learned_study()
    info = goodput_info(study, noise_scale=200)
    for point in info.points:
        rate = point.throughput.value
        expected = goodput(
            point.batch_size, point.batch_size / rate, noise_scale=200, base_batch_size=16
        )
        assert point.goodput.value == pytest.approx(expected)
    assert info.points[0].goodput.value == info.points[0].throughput.value
    assert all(p.goodput.value <= p.throughput.value for p in info.points)


@pytest.mark.parametrize("noise_scale", [1, 100, 10_000])
def test_the_marked_size_is_that_of_the_largest_goodput(noise_scale):
    study = learned_study()
    info = goodput_info(study, noise_scale=noise_scale)
    times = [p.batch_size / p.throughput.value for p in info.points]
    sizes = [p.batch_size for p in info.points]
    assert info.best == best_measured_batch_size(sizes, times, noise_scale=noise_scale)
    # The times are a line: the best of all sizes lies within a factor of two.
    overhead_s = step_time_s(0)
    ideal = best_batch_size(
        overhead_s=overhead_s, per_example_s=1 / 18_000, noise_scale=noise_scale
    )
    assert abs(math.log2(info.best / min(max(ideal, 16), 1024))) <= 1


def test_the_noise_scale_is_that_of_the_best_trial_with_its_interval():
    study = learned_study(3)
    info = goodput_info(study)
    scale = study.best_trial().noise_scale
    assert info.noise_scale == scale.value
    used = info.notes[0]
    assert f"{in_brackets(scale.interval)}, of the late half of training at batch size " in used
    assert f"at batch size {study.best_trial().batch_size:,};" in used
    low, high = (
        goodput_info(study, noise_scale=end).best
        for end in (scale.interval.low, scale.interval.high)
    )
    first, last = min(low, high, info.best), max(low, high, info.best)
    sizes = f"batch size {last:,}" if first == last else f"batch sizes from {first:,} to {last:,}"
    assert f"over which {sizes} would have the largest goodput" in used
    assert all(p.goodput.bar[0] <= p.goodput.value <= p.goodput.bar[1] for p in info.points)


def test_a_trial_without_moments_lends_those_of_another():
    study = make_study(
        make_trial(16, learned(16, best=0.99, moments=False)),
        make_trial(256, learned(256, best=0.9)),
    )
    assert study.best_trial().batch_size == 16
    assert goodput_info(study).noise_scale == study.trials[1].noise_scale.value


def test_both_curves_and_the_choice_are_drawn():
    study = learned_study()
    panel = plot_goodput(study)
    info = goodput_info(study)
    lines = {line.get_label(): line for line in panel.lines}
    assert list(lines["goodput"].get_ydata()) == [p.goodput.value for p in info.points]
    assert list(lines["throughput"].get_ydata()) == [p.throughput.value for p in info.points]
    assert f"largest: {info.best:,}" in texts(panel)
    assert "out of memory" in texts(panel)
    assert panel.get_ylim()[0] == 0


def test_a_best_trial_of_another_size_is_explained():
    study = learned_study()
    best = study.best_trial().batch_size
    assert goodput_info(study).best != best
    said = f"Batch size {best} had the best validation accuracy: goodput measures how fast"
    assert said in texts(plot_goodput(study))
    agreed = learned_study(sizes=(goodput_info(study).best,))
    assert not any("had the best" in note for note in goodput_info(agreed).notes)


def test_without_a_noise_scale_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"micro_batch_size=n.*noise_scale=200.*7 trials"):
        plot_goodput(make_study())


def test_without_a_throughput_it_says_so():
    trial = make_trial(64, window_examples=(), window_durations_s=())
    with pytest.raises(ValueError, match="throughput"):
        plot_goodput(make_study(trial), noise_scale=100)
