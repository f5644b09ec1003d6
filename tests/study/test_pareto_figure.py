import numpy as np
import pytest
from figure_studies import tuned_study
from records_factory import make_execution, make_study, make_trial

from kbatch.study.figures.quality import pareto_front, pareto_points, plot_pareto
from kbatch.study.trial import Objective

# Fast and bad, slow and good, and one that both beat.
TRIALS = {16: (1000, 0.98), 64: (4000, 0.9), 32: (900, 0.89)}


def study(direction="max", **changed):
    objective = Objective("val_accuracy" if direction == "max" else "val_loss", direction)
    return make_study(
        *(
            make_trial(size, objective=objective, rate=rate, accuracies=(value,), **changed)
            for size, (rate, value) in TRIALS.items()
        ),
        make_trial(4096, status="out_of_memory"),
    )


def texts(panel):
    return [text.get_text() for text in panel.texts]


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_no_other_choice_beats(seed):
    # Small integers, so that many are equal in one quality or in both.
    choices = [tuple(pair) for pair in np.random.default_rng(seed).integers(0, 6, (12, 2)).tolist()]
    beaten = {
        place
        for place, own in enumerate(choices)
        if any(one[0] >= own[0] and one[1] >= own[1] and one != own for one in choices)
    }
    front = pareto_front(choices)
    assert set(front) == set(range(12)) - beaten
    assert [choices[place][0] for place in front] == sorted(choices[place][0] for place in front)


@pytest.mark.parametrize("direction", ["max", "min"])
def test_the_front_holds_what_no_trial_beats(direction):
    # The loss is 1.1 less the accuracy: the same trials are best.
    _, points = pareto_points(study(direction))
    found = [(trial.batch_size, best) for trial, _, _, best in points]
    assert found == [(32, False), (16, True), (64, True)]
    assert [rate.value for _, rate, _, _ in points] == pytest.approx([900, 1000, 4000])


@pytest.mark.parametrize(("direction", "edge"), [("max", 0), ("min", 1)])
def test_the_steps_bound_what_some_trial_beats(direction, edge):
    panel = plot_pareto(study(direction))
    (steps,) = [line for line in panel.lines if line.get_drawstyle() == "steps-pre"]
    xs, ys = list(steps.get_xdata()), list(steps.get_ydata())
    assert xs == pytest.approx([panel.get_xlim()[0], 1000, 4000, 4000])
    qualities = [value.value for *_, value, best in pareto_points(study(direction))[1] if best]
    assert ys == pytest.approx([qualities[0], *qualities, panel.get_ylim()[edge]])


def test_throughput_begins_at_zero_unless_it_spans_more_than_a_decade():
    assert plot_pareto(study()).get_xlim()[0] == 0
    trials = (make_trial(size, rate=rate) for size, rate in ((1, 100), (512, 9000)))
    wide = plot_pareto(make_study(*trials))
    assert wide.get_xscale() == "log"


def test_intervals_of_both_are_drawn():
    executions = [
        make_execution(rate=r, accuracies=(a,)) for r, a in ((900, 0.9), (1000, 0.95), (1100, 0.92))
    ]
    panel = plot_pareto(make_study(make_trial(64, *executions)))
    assert len(panel.collections) == 2
    assert any("95 % interval" in text.replace("\xa0", " ") for text in texts(panel))


def test_many_trials_are_named_by_size_and_those_on_the_front_by_their_settings():
    panel = plot_pareto(tuned_study(200))
    assert len(panel.get_legend().get_texts()) == 8
    assert "units=" in texts(panel)[1]
    assert len(panel.lines) < 30
