"""Which budget a study used, in every place that shows its numbers."""

import pytest
from records_factory import make_epochs, make_execution, make_study, make_trial

from kbatch.records.training_run import Budget, Target
from kbatch.study.names import caption
from kbatch.study.trial import Objective

TARGET = Target("val_accuracy", 0.95, "max")


def spent(batch_size, *, epochs=2, updates=50, examples=3200, **changed):
    accuracies = [0.5 + 0.1 * i for i in range(epochs)]
    run = make_execution(
        batch_size,
        epochs=make_epochs(accuracies, examples=examples // epochs, updates=updates // epochs),
        examples_seen=examples,
        updates=updates,
        **changed,
    )
    return make_trial(batch_size, run)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(train_s=30.0), "30 s of training"),
        (Budget(2.5, 500, 3_200), "2.5 s of training or 500 updates or 3,200 examples"),
    ],
)
def test_the_budget_is_named(budget, words):
    study = make_study(spent(16, budget=budget), spent(256, epochs=4, budget=budget))
    assert f"budget: {words} (2 to 4 epochs) each" in caption(study.trials, study.environment)
    assert f", for {words} (2 to 4 epochs): nothing is certified" in study.answer


def test_without_a_budget_it_is_the_number_of_epochs():
    study = make_study(spent(16), spent(64))
    assert "budget: 2 epochs of 1,600 examples each" in caption(study.trials, study.environment)


def to_target(batch_size, accuracies):
    run = make_execution(
        batch_size,
        epochs=make_epochs(accuracies, examples=100, updates=10, train_s=0.5),
        target=TARGET,
        budget=Budget(train_s=60.0),
    )
    return make_trial(batch_size, run, objective=Objective("seconds_to_target", "min"))


def test_the_way_to_a_target_is_told_in_caption_answer_and_table():
    study = make_study(
        to_target(16, (0.5, 0.9, 0.96)), to_target(64, (0.5, 0.97)), to_target(256, (0.5, 0.6))
    )
    until = "until val_accuracy ≥ 0.95, at most 60 s of training"
    assert f"budget: {until} (2 to 3 epochs) each" in caption(study.trials, study.environment)
    assert study.answer.startswith(f"Take batch size 64 with learning rate 0.001, {until} (2 to 3 ")
    table = study.table().set_index("batch size")
    assert list(table["time to target (s)"][:2]) == [1.5, 1.0]
    assert list(table["updates to target"][:2]) == [30, 20]
    assert table["outcome"][256] == "never met the target"
    assert table["time to target (s)"].isna()[256]
