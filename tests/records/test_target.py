import math

import numpy as np
import pytest
from records_factory import make_epochs, make_execution, make_trial

from kbatch.records.training_run import Target, epochs_to_target, seconds_to_target
from kbatch.study.trial import Objective

RISING = (0.2, 0.5, 0.4, 0.9)


def epochs(values=RISING):
    return make_epochs(values, examples=100, updates=7, train_s=0.5)


def naive(target, values):
    """Epochs up to the first that meets the target, counted one by one."""
    for number, value in enumerate(values, start=1):
        if (target.direction == "max" and value >= target.value) or (
            target.direction == "min" and value <= target.value
        ):
            return number
    return None


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("value", [0.1, 0.2, 0.45, 0.5, 0.9, 0.95])
def test_seconds_to_target_are_those_of_the_epochs_up_to_the_first_that_meets_it(direction, value):
    target = Target("val_accuracy", value, direction)
    count, seconds = naive(target, RISING), seconds_to_target(target, epochs())
    if count is None:
        assert seconds is None
    else:
        assert seconds == pytest.approx(0.5 * count)
        assert epochs_to_target(target, epochs()) == epochs()[:count]


def test_what_is_missing_or_not_finite_meets_no_target():
    target = Target("val_auc", 0.0, "max")
    assert seconds_to_target(target, epochs()) is None
    assert not target.is_met(None)
    assert not target.is_met(math.nan)
    assert seconds_to_target(Target("val_accuracy", 0.5, "max"), ()) is None


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.9, 0.95])
def test_a_metric_in_float32_meets_its_own_value(direction, value):
    target = Target("loss", value, direction)
    assert target.is_met(float(np.float32(value)))
    assert not target.is_met(value + (1e-5 if direction == "min" else -1e-5))


def executed(*runs, value=0.5):
    target = Target("val_accuracy", value, "max")
    return make_trial(
        64,
        *(make_execution(64, epochs=epochs(run), target=target) for run in runs),
        objective=Objective("seconds_to_target", "min"),
    )


def test_a_trial_has_the_mean_seconds_to_target_of_its_executions():
    trial = executed((0.5,), (0.1, 0.6), (0.1, 0.2, 0.5))
    assert trial.seconds_to_target == pytest.approx(1.0)
    assert trial.judged_value == pytest.approx(1.0)


def test_a_trial_has_no_seconds_to_target_if_an_execution_never_met_it():
    trial = executed((0.5,), (0.1, 0.2), (0.6,))
    assert trial.status == "completed"
    assert trial.seconds_to_target is None
    assert trial.judged_value is None
