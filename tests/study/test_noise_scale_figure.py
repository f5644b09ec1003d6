import dataclasses

import pytest
from figure_studies import learned_study
from records_factory import make_epochs, make_execution, make_study, make_trial

from kbatch.study.figures.noise_scale import noise_scale_info, plot_noise_scale


def with_moments(pairs, batch_size=64):
    epochs = [
        dataclasses.replace(
            epoch,
            metrics=epoch.metrics | {"gradient_variance": s, "gradient_squared_norm": g},
        )
        for epoch, (s, g) in zip(make_epochs([0.5] * len(pairs)), pairs, strict=True)
    ]
    return make_trial(batch_size, make_execution(batch_size, epochs=tuple(epochs)))


def test_the_curve_is_the_ratio_of_each_epoch():
    info = noise_scale_info(make_study(with_moments([(60, 2), (90, 1), (100, -1), (80, 1)])))
    assert info.curves[0].runs == (((1, 30.0), (2, 90.0), (4, 80.0)),)
    assert info.epochs == 4


def test_the_late_half_is_that_of_the_record_with_its_interval():
    study = learned_study(3, sizes=(32, 256))
    panel = plot_noise_scale(study)
    info = noise_scale_info(study)
    for curve, trial in zip(info.curves, study.trials, strict=False):
        assert curve.late == trial.noise_scale
        assert len(curve.runs) == 3
    bars = [segment for c in panel.collections for segment in c.get_segments()]
    spans = [(bar[0][1], bar[1][1]) for bar in bars]
    assert spans == [
        pytest.approx((c.late.interval.low, c.late.interval.high)) for c in info.curves
    ]
    assert min(bar[0][0] for bar in bars) > info.epochs
    assert panel.get_ylabel() == "Gradient noise scale\n(examples)"


def test_an_unresolved_scale_is_an_arrow_from_its_lower_bound():
    pairs = [(100.0, norm) for norm in (0.05, -0.04, 0.06, -0.05, 0.04, 0.03)]
    study = make_study(with_moments(pairs))
    late = noise_scale_info(study).curves[0].late
    assert late.value is None
    panel = plot_noise_scale(study)
    arrows = [text for text in panel.texts if text.arrow_patch is not None]
    assert [arrow.xy[1] for arrow in arrows] == [late.at_least]


def test_a_study_without_moments_says_what_to_run():
    with pytest.raises(ValueError, match=r"micro_batch_size=n.*7 trials without gradient moments"):
        plot_noise_scale(make_study())


def test_every_batch_size_is_named():
    panel = plot_noise_scale(learned_study(sizes=(32, 256, 1024)))
    assert [t.get_text() for t in panel.get_legend().get_texts()] == ["32", "256", "1,024"]
