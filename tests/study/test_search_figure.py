"""The figure of a search over time."""

import dataclasses
import itertools

import pytest
from figure_samples import words
from figure_studies import learned_study, rates_study, timed
from records_factory import make_execution, make_search, make_study, make_trial

from kbatch.study.figures.timelines import plot_search, search_answers, search_bars


def test_search_bars_have_row_for_each_worker():
    for workers in (1, 2):
        study = timed(learned_study(3), workers=workers)
        bars, pauses = search_bars(study)
        ran = {run.seed: run for trial in study.trials for run in trial.executions}
        assert len(bars) == 3 * 7 + 1 and not pauses and ran
        assert {lane for lane, *_ in bars} == {*range(workers)}
        assert bars[0][1] == pytest.approx(5.0)  # After the plan.
        for lane in range(workers):
            own = [bar for bar in bars if bar[0] == lane]
            for (_, began, train_s, rest_s, _), (_, following, *_) in itertools.pairwise(own):
                assert following >= began + train_s + rest_s
        rows = [text.get_text() for text in plot_search(study).get_yticklabels()]
        assert rows == [["training", "plan"], ["worker 1", "worker 2", "plan"]][workers - 1]


def test_search_answers_use_earlier_runs_only():
    study = timed(rates_study())
    study = dataclasses.replace(study, search=make_search(strategy="race", batch_sizes=[32, 128]))
    bars, _ = search_bars(study)
    found = search_answers(study, bars)
    assert found[-1][1] is study.decide()
    assert [moment for moment, _ in found] == sorted({sum(bar[1:4]) for bar in bars})
    sizes = [decision.batch_size for _, decision in found]
    # At first only the base size has trained.
    assert sizes[0] == 32 and set(sizes) >= {study.decide().batch_size}
    for moment, decision in found:
        known = [bar for bar in bars if sum(bar[1:4]) <= moment]
        assert sum(len(trial.executions) for trial in decision.trials) <= len(known)


@pytest.mark.parametrize("length", ["complete", "short"])
def test_plot_search_legend_of_hollow_bars(length):
    runs = make_execution(64, spans=((0.0, 1.0, 2.0),), length=length)
    axes = plot_search(make_study(make_trial(64, runs, make_execution(64, spans=((2.0, 1, 2),)))))
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["64"]
    assert ("Hollow: ended early." in axes.get_label()) == (length == "short")


@pytest.mark.parametrize(
    ("pause_s", "text"), [(0.1, ""), (6.0, "pause of 6"), (3600.0, "pause of 60 min")]
)
def test_plot_search_cuts_long_pause_out(pause_s, text):
    spans = (0.0, 6.0, 8.0), (8.0 + pause_s, 10.0, 12.0)
    runs = [make_execution(64, seed=n, spans=(span,)) for n, span in enumerate(spans)]
    study = make_study(make_trial(64, *runs), make_trial(32, status="failed"))
    bars, pauses = search_bars(study)
    left_s = 0.0 if text else pause_s
    assert [bar[1:4] for bar in bars] == [(0.0, 6.0, 2.0), (8.0 + left_s, 10.0, 2.0)]
    assert pauses == ([(8.0, pause_s)] if text else [])
    shown = words(axes := plot_search(study))
    assert text in shown and ("pause" in shown) == bool(text) and "(s)" in shown
    assert axes.get_xlim()[1] == pytest.approx(1.03 * (20 + left_s))


def test_plot_search_without_start_times():
    with pytest.raises(ValueError, match="start times of training runs"):
        plot_search(learned_study())
