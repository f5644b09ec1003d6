import dataclasses

import pytest
from figure_studies import learning
from records_factory import make_execution, make_study, make_trial

from kbatch.search.live_plot import draw_live


def running(batch_size, epochs=(), **changed):
    """A trial that runs, with so many of its epochs."""
    execution = make_execution(batch_size, status="running", failure=None)
    windows = {"window_examples": (100,), "window_durations_s": (0.1,)} if epochs else {}
    return make_trial(
        batch_size, dataclasses.replace(execution, epochs=tuple(epochs), **windows), **changed
    )


def hollow(axes):
    return [
        (panel, line.get_xdata()[0], line.get_ydata()[0])
        for panel in axes.figure.axes
        for line in panel.lines
        if line.get_markerfacecolor() == "#ffffff"
    ]


def test_the_running_trial_is_hollow_in_both_panels():
    epochs = learning(64)[:3]
    study = make_study(make_trial(16), make_trial(32), running(64, epochs))
    axes = draw_live(study, running="0064", status="2 ended")
    upper, lower = axes.figure.axes
    best = max(epoch.metrics["val_accuracy"] for epoch in epochs)
    assert hollow(axes) == [(upper, 64, pytest.approx(1000)), (lower, 64, pytest.approx(best))]
    assert axes.get_title(loc="left") == "digits: 2 ended"


def test_a_trial_without_an_epoch_is_not_drawn():
    study = make_study(make_trial(16), running(32))
    axes = draw_live(study, running="0032", status="1 ended")
    assert hollow(axes) == []
    places = {place for line in axes.lines for place in line.get_xdata()}
    assert 16 in places
    assert 32 not in places


def test_before_the_first_epoch_it_says_so():
    axes = draw_live(make_study(running(16)), running="0016", status="0 ended")
    assert "No epoch has ended yet." in [text.get_text() for text in axes.texts]


def test_after_the_search_no_trial_is_hollow():
    axes = draw_live(make_study(), running=None, status="7 trials ended")
    assert hollow(axes) == []


def test_of_several_executions_the_ended_ones_count_too():
    ended = make_execution(64, accuracies=(0.9,))
    trial = running(64, learning(64)[:2])
    both = dataclasses.replace(trial, executions=(ended, *trial.executions))
    axes = draw_live(make_study(both), running="0064", status="0 ended")
    assert len(hollow(axes)) == 2
