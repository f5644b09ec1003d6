import numpy as np
import pytest
from figure_studies import learned, learned_study
from records_factory import make_epochs, make_study, make_trial, with_moments

from kbatch.analysis.goodput import goodput
from kbatch.study.figures.efficiency import goodput_of, plot_noise_scale


def measured(pairs, batch_size=64):
    return make_trial(batch_size, epochs=with_moments(make_epochs([0.5] * len(pairs)), pairs))


def test_plot_noise_scale_curve_is_ratio_of_moments():
    panel = plot_noise_scale(make_study(measured([(60, 2), (90, 1), (100, -1), (80, 1)])))
    curve = panel.lines[0]
    assert list(curve.get_xdata()) == [1, 2, 4]
    assert list(curve.get_ydata()) == [30.0, 90.0, 80.0]


def test_plot_noise_scale_late_half_has_interval():
    study = learned_study(3, sizes=(32, 256))
    panel = plot_noise_scale(study)
    scales = [trial.noise_scale for trial in study.trials[:2]]
    bars = [segment for c in panel.collections for segment in c.get_segments()]
    spans = [(bar[0][1], bar[1][1]) for bar in bars]
    assert spans == [pytest.approx(scale.ends) for scale in scales]
    assert min(bar[0][0] for bar in bars) > len(study.trials[0].executions[0].epochs)
    assert panel.get_ylabel() == "Gradient noise scale\n(examples)"
    *runs, mean = ([*line.get_ydata()] for line in panel.lines[:4])
    np.testing.assert_allclose(mean, np.mean(runs, axis=0))


def test_plot_noise_scale_lower_bound_is_arrow():
    pairs = [(100.0, norm) for norm in (0.05, -0.04, 0.06, -0.05, 0.04, 0.03)]
    study = make_study(measured(pairs))
    late = study.trials[0].noise_scale
    assert late.value is None
    panel = plot_noise_scale(study)
    arrows = [text for text in panel.texts if text.arrow_patch is not None]
    assert [arrow.xy[1] for arrow in arrows] == [late.low]


@pytest.mark.parametrize(
    "study",
    [make_study(), make_study(*(measured([(60, 2), (90, -1)], size) for size in (32, 64)))],
    ids=["no moments", "two epochs"],
)
def test_plot_noise_scale_without_anything_to_show(study):
    with pytest.raises(ValueError, match=r"three epochs.*micro_batch_size.*without a noise"):
        plot_noise_scale(study)
    assert "noise-scale" not in [figure.name for figure in study.figures()]


def test_goodput_of_uses_noise_scale_of_best_trial():
    study = learned_study(3)
    (throughput, found, best, note), scale = goodput_of(study), study.decide().best.noise_scale
    rates = {size: rate.value for size, rate in throughput.items()}

    def expected(noise_scale):
        fixed = {"noise_scale": noise_scale, "base_batch_size": 16}
        return [goodput(size, size / rate, **fixed) for size, rate in rates.items()]

    values = [one.value for one in found.values()]
    np.testing.assert_allclose(values, expected(scale.value), rtol=1e-12)
    bars = [one.ends for one in found.values()]
    ends = zip(expected(scale.low), expected(scale.high), strict=True)
    np.testing.assert_allclose(bars, [sorted(both) for both in ends], rtol=1e-12)
    assert best == max(found, key=lambda size: found[size].value)
    assert f" at batch size {study.decide().best.batch_size:,}: " in note


def test_plot_noise_scale_draws_goodput():
    study = learned_study()
    upper = plot_noise_scale(study)
    (panel,) = (axes for axes in upper.figure.axes if axes is not upper)
    throughput, found, best, _ = goodput_of(study)
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert lines["goodput"] == [one.value for one in found.values()]
    assert lines["throughput"] == [one.value for one in throughput.values()]
    assert f"largest goodput: {best:,}" in [text.get_text() for text in panel.texts]


def test_goodput_of_best_trial_without_moments():
    best = make_trial(16, learned(16, best=0.99, moments=False))
    study = make_study(best, make_trial(256, learned(256, best=0.9)))
    assert study.decide().best.batch_size == 16
    assert "Noise scale at batch size 256: " in goodput_of(study)[-1]


def test_goodput_of_missing_measurements():
    one_size = learned_study(sizes=(64,))
    unresolved = [(100.0, norm) for norm in (0.05, -0.04, 0.06, -0.05, 0.04, 0.03)]
    without = make_study(measured(unresolved, 32), measured(unresolved, 64))
    untimed = {"window_examples": (), "window_durations_s": ()}
    slow = make_study(*(make_trial(size, learned(size, **untimed)) for size in (32, 256)))
    for study in (one_size, without, slow):
        assert goodput_of(study) is None
        (figure,) = (one for one in study.figures() if one.name == "noise-scale")
        assert len(figure.draw(None).figure.axes) == 1
        assert "goodput" not in figure.title
