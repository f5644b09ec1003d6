"""Which budget a study used, in every place that shows its numbers."""

import pytest
from records_factory import make_epochs, make_execution, make_study, make_trial

from kbatch.records.training_run import Budget, Target
from kbatch.study.caveats import caveats
from kbatch.study.names import caption
from kbatch.study.table import trial_table
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


def found(study, words):
    return [c.text for c in caveats(study) if words in c.text]


@pytest.mark.parametrize(
    ("budget", "kind", "words", "large", "favours"),
    [
        (Budget(train_s=30.0), "Equal-seconds", "30 s of training", (8, 2_048), "fair to all"),
        (Budget(updates=50), "Equal-updates", "50 updates", (52, 12_800), "favours large"),
        # The epochs ended before it, so each size saw as many examples.
        (Budget(updates=500), "Equal-updates", "500 updates", (16, 3_200), "favours small"),
        (Budget(examples=3_200), "Equal-examples", "3,200 examples", (12, 3_072), "favours small"),
        (Budget(2.5, 500), "Equal-spending", "2.5 s of training or 500 updates", (8, 2_048), None),
    ],
)
def test_the_budget_is_named_with_whom_it_favours(budget, kind, words, large, favours):
    updates, examples = large
    study = make_study(
        spent(16, budget=budget),
        spent(256, epochs=4, updates=updates, examples=examples, budget=budget),
    )
    (text,) = found(study, kind)
    assert words in text
    assert favours in text if favours else "favours" not in text
    assert f"batch size 256 made {updates} updates on {examples:,} examples" in text
    assert "batch size 16 made 50 on 3,200" in text
    assert f"budget: {words} (2 to 4 epochs) each" in caption(study.conditions)
    assert f", for {words} (2 to 4 epochs)." in study.decide().page.headline
    assert found(study, "Equal-epochs") == found(study, "budgets differ") == []


def test_without_a_budget_it_is_the_number_of_epochs():
    study = make_study(spent(16), spent(64))
    assert found(study, "Equal-epochs budget: each execution trained for 2 epochs")
    assert "budget: 2 epochs of 1,600 examples each" in caption(study.conditions)


def test_epochs_of_as_many_steps_favour_large_batches():
    (text,) = found(make_study(spent(8, examples=400), spent(64)), "Equal-epochs")
    assert "batch size 64 made 50 updates on 3,200 examples and batch size 8 made 50 on 400" in text
    assert "favours large batches" in text and "favours small" not in text
    # Neither counts are equal where the data end before the steps do.
    (text,) = found(make_study(spent(8, examples=400), spent(64, updates=20)), "Equal-epochs")
    assert "favours" not in text


def test_budgets_that_differ_are_told():
    study = make_study(spent(16, budget=Budget(train_s=3.0)), spent(64, budget=Budget(train_s=4.0)))
    assert found(study, "The budgets differ: executions had 3 s of training or 4 s of training")


def to_target(batch_size, accuracies):
    run = make_execution(
        batch_size,
        epochs=make_epochs(accuracies, examples=100, updates=10, train_s=0.5),
        target=TARGET,
        budget=Budget(train_s=60.0),
    )
    return make_trial(batch_size, run, objective=Objective("seconds_to_target", "min"))


def test_the_way_to_a_target_is_told_in_caption_decision_table_and_caveats():
    study = make_study(
        to_target(16, (0.5, 0.9, 0.96)), to_target(64, (0.5, 0.97)), to_target(256, (0.5, 0.6))
    )
    until = "until val_accuracy ≥ 0.95, at most 60 s of training"
    assert f"budget: {until} (2 to 3 epochs) each" in caption(study.conditions)
    headline = study.decide().page.headline
    assert headline == f"Take batch size 64 with learning rate 0.001, {until} (2 to 3 epochs)."
    (text,) = found(study, "Budget to a target")
    assert "Batch size 256 never reached it." in text
    table = trial_table(study)
    column = table.headers.index("Seconds to val_accuracy 0.95")
    assert [row.cells[column].text for row in table.rows] == ["1.50", "1.00", "never met"]
    assert [row.cells[column + 1].text for row in table.rows] == ["30", "20", "never met"]
    assert [row.cells[column + 2].text for row in table.rows] == ["300", "200", "never met"]


def test_a_target_that_no_trial_met_is_told():
    told = make_study(to_target(16, (0.5,)), to_target(64, (0.6,))).decide().page
    assert "No batch size can be named" in told.headline
    assert "No trial met the target" in told.certainty


def test_trials_without_a_target_have_no_column_for_it():
    assert not [title for title in trial_table(make_study()).headers if " to " in title]


@pytest.mark.parametrize(("workers", "told"), [(None, 0), (1, 0), (2, 1)])
def test_a_device_that_workers_shared_is_told(workers, told):
    study = make_study(make_trial(16), make_trial(64, workers_on_device=workers))
    texts = found(study, "shared by 2 workers at batch size 64")
    assert len(texts) == told
