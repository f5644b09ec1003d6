import dataclasses
import math
import re

import numpy as np
import pytest
from records_factory import (
    make_diverged,
    make_epochs,
    make_execution,
    make_gpu,
    make_study,
    make_trial,
    make_usage,
)

from kbatch.analysis.intervals import mean_interval
from kbatch.records.training_run import EpochRecord, Outcomes, Target
from kbatch.study.study import Study
from kbatch.study.trial import Objective

USAGE = [
    *("joules_to_target", "joules_per_sample", "gpu_energy_j", "gpu_power_w", "gpu_utilization")
]


def test_the_columns_are_the_documented_ones():
    columns = list(make_study().to_dataframe().columns)
    assert columns[32:] == ["loss", "val_accuracy", "val_loss", "val_accuracy_judged"]
    words = re.findall(r"`(\w+)`", Study.to_dataframe.__doc__.split("Returns:")[0])
    # `_high` stands for the name before it.
    documented = [
        words[i - 1].replace("_low", "_high") if word == "_high" else word
        for i, word in enumerate(words)
    ]
    assert columns[:32] == documented
    runs = list(make_study().runs_to_dataframe().columns)
    assert [name for name in runs if name not in columns] == ["run", "seed", "length"]
    assert [name for name in columns if name not in runs] == ["executions"]


def test_runs_to_dataframe_has_a_row_for_every_run_of_any_length_and_end():
    short = make_execution(32, seed=1, length="short", accuracies=(0.6, 0.8))
    stopped = make_execution(32, seed=2, length="stopped_early", accuracies=(0.1,))
    study = make_study(make_trial(32, short, make_execution(32), stopped), make_diverged(64))
    rows = study.runs_to_dataframe()
    assert rows["trial_id"].tolist() == ["0032"] * 3 + ["0064"]
    assert rows["run"].tolist() == [0, 1, 2, 0]
    assert rows["seed"].tolist() == [1, 0, 2, 0]
    assert rows["length"].tolist() == ["short", "complete", "stopped_early", "complete"]
    assert rows["status"].tolist() == ["completed"] * 3 + ["failed"]
    assert rows["epochs"].tolist() == [2, 2, 1, 1]
    np.testing.assert_allclose(rows["val_accuracy"], [0.8, 0.97, 0.1, math.nan])
    np.testing.assert_allclose(rows["val_accuracy_judged"], [0.7, 0.935, 0.1, math.nan])
    shown = study.runs_table()
    assert shown["ended"].tolist() == ["short", "complete", "stopped early", "diverged"]
    np.testing.assert_allclose(shown["judged"], rows["val_accuracy_judged"])


def test_what_was_measured_of_the_devices_stands_in_the_table():
    target = Target("val_accuracy", 0.9, "max")
    runs = [
        make_execution(
            16, accuracies=(0.8, 0.95), target=target, usage=make_usage(make_gpu(energy_j=e))
        )
        for e in (2874.0, 5748.0)
    ]
    study = make_study(make_trial(16, *runs), make_trial(32))
    known, unknown = study.to_dataframe()[USAGE].to_dict("records")
    assert known == {
        "joules_to_target": 4311.0,
        "joules_per_sample": 1.5,
        "gpu_energy_j": 4311.0,
        "gpu_power_w": 300.0,
        "gpu_utilization": 0.8,
    }
    assert all(math.isnan(value) for value in unknown.values())
    assert study.runs_to_dataframe()["joules_per_sample"].tolist()[:2] == [1.0, 2.0]


@pytest.mark.parametrize("accuracies", [(0.8,), (0.95, 0.96), (0.95, 0.8)])
def test_energy_is_that_to_the_target_only_where_training_ended_there(accuracies):
    target = Target("val_accuracy", 0.9, "max")
    run = make_execution(accuracies=accuracies, target=target, usage=make_usage(make_gpu()))
    assert run.usage.gpu_energy_j is not None
    assert run.joules_to_target is None


def test_a_trial_is_the_mean_of_its_executions():
    study = make_study(
        make_trial(
            64,
            make_execution(rate=1000, accuracies=(0.9,)),
            make_execution(rate=1200, accuracies=(0.8, 0.98)),
            make_execution(rate=1300, accuracies=(0.7, 0.8, 0.9)),
        )
    )
    row = study.to_dataframe().iloc[0]
    rows = study.runs_to_dataframe()
    for column in ("samples_per_second", "val_accuracy", "updates", "epochs", "data_wait_share"):
        np.testing.assert_allclose(row[column], rows[column].mean())
    interval = mean_interval([1000, 1200, 1300])
    np.testing.assert_allclose(
        [row["samples_per_second_low"], row["samples_per_second_high"]],
        [interval.low, interval.high],
    )


def test_every_table_has_the_learning_rate_that_training_began_with():
    (epoch,) = make_epochs((0.9,))
    lowered = dataclasses.replace(epoch, learning_rate=1e-5)  # By a callback.
    study = make_study(make_trial(64, epochs=(lowered,)))
    assert study.to_dataframe()["learning_rate"][0] == study.table()["learning rate"][0] == 0.001


def test_samples_per_second_are_without_a_pause_and_the_same_in_every_table():
    trial = make_trial(64, window_examples=(100,) * 9, window_durations_s=(0.1,) * 8 + (3.7,))
    assert trial.samples_per_second == trial.executions[0].samples_per_second == pytest.approx(1000)
    study = make_study(trial)
    for table in (study.to_dataframe(), study.runs_to_dataframe()):
        assert table["samples_per_second"].tolist() == [pytest.approx(1000)]


@pytest.mark.parametrize(
    ("accuracies", "low", "high"), [((0.5, 0.99, 0.8), None, 1), ((0.01, 0.4, 0.2), 0, None)]
)
def test_the_interval_of_an_accuracy_ends_where_accuracy_ends(accuracies, low, high):
    found = make_trial(64, *(make_execution(accuracies=(a,)) for a in accuracies))
    raw, ends = mean_interval(accuracies), found.metric("val_accuracy").ends
    assert ends == (raw.low if low is None else low, raw.high if high is None else high)
    pair = make_trial(64, make_execution(rate=1000), make_execution(rate=1200))
    assert (pair.throughput.value, pair.throughput.ends) == (1100, None)
    wild = make_trial(32, *(make_execution(32, rate=rate) for rate in (100.0, 200.0, 3000.0)))
    assert wild.throughput.low == 0.0
    single = make_trial(64, window_examples=(100,), window_durations_s=(0.1,))
    assert (single.throughput.value, single.throughput.ends) == (1000, None)


def test_the_judged_value_is_the_mean_of_the_outcomes():
    values = (0.94, 0.95, 0.96)
    outcomes = Outcomes(metric="val_accuracy", values=values, key="k", examples=3)
    trial = make_trial(64, outcomes=outcomes)  # Its best epoch has 0.97.
    assert trial.judged_value == pytest.approx(0.95)
    assert trial.metrics["val_accuracy"] == 0.97
    # Both have the interval over the examples.
    for found, value in ((trial.judged(), 0.95), (trial.metric("val_accuracy"), 0.97)):
        assert found.value == pytest.approx(value)
        assert (
            found.high - value
            == pytest.approx(value - found.low)
            == pytest.approx(0.0248, abs=1e-4)
        )
    # The weights of a trial are those of its best epoch.
    assert trial.best_objective_value == 0.97
    # Without outcomes, what a `fit` of the user's own reports decides.
    own = make_trial(64, reported={"val_accuracy": 0.8})
    assert (own.judged_value, own.metrics["val_accuracy"]) == (0.8, 0.8)
    zero = dataclasses.replace(outcomes, values=(0.0, 0.0))
    assert make_trial(64, outcomes=zero).judged_value == 0.0


def test_a_metric_that_is_not_finite_is_missing():
    trial = make_trial(64, epochs=make_epochs((math.nan, 0.9, math.inf)))
    assert trial.executions[0].best_epoch("val_accuracy", "max").epoch == 1
    assert trial.judged_value == 0.9
    lost = make_trial(64, epochs=make_epochs((math.nan,)))
    assert (lost.metrics, lost.judged_value) == ({}, None)


def test_a_metric_or_a_hyperparameter_never_covers_a_column():
    epoch = EpochRecord(0, {"loss": 0.1, "val_accuracy": 0.5, "updates": 3.5}, 64, 1, 0.1, None)
    tuned = {"learning_rate": 0.5, "loss": "mse", "units": 8}
    trial = make_trial(64, hyperparameters=tuned, epochs=(epoch,), updates=1)
    row = make_study(trial).to_dataframe().iloc[0]
    assert (row["learning_rate"], row["updates"], row["val_accuracy"]) == (0.001, 1, 0.5)
    assert (row["hp/learning_rate"], row["hp/loss"], row["units"]) == (0.5, "mse", 8)


@pytest.mark.parametrize(("direction", "expected"), [("max", 0.97), ("min", 0.8)])
def test_the_metrics_are_those_of_the_best_epoch(direction, expected):
    objective = Objective("val_accuracy", direction)
    trial = make_trial(64, objective=objective, accuracies=(0.9, 0.97, 0.8, 0.97))
    assert trial.metrics["val_accuracy"] == expected
    assert (
        trial.executions[0].best_epoch("val_accuracy", direction).epoch
        == {"max": 1, "min": 2}[direction]
    )


@pytest.mark.parametrize(
    ("objective", "quality"),
    [
        (Objective("val_loss", "min"), Objective("val_loss", "min")),
        (Objective("samples_per_second", "max"), Objective("val_accuracy", "max")),
    ],
)
def test_the_quality_metric_is_the_objective_or_an_accuracy(objective, quality):
    assert make_study(make_trial(objective=objective)).quality_metric == quality


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (["completed", "failed"], "failed"),
        (["failed", "out_of_memory"], "out_of_memory"),
        (["completed", "interrupted"], "interrupted"),
        (["running", "completed"], "running"),
    ],
)
def test_a_trial_has_the_worst_status_of_its_executions(statuses, worst):
    trial = make_trial(64, *(make_execution(status=status) for status in statuses))
    assert trial.status == worst


@pytest.mark.parametrize(("batch", "micro", "steps"), [(100, 32, 4), (8, 8, 1)])
def test_the_remainder_counts_as_an_accumulation_step(batch, micro, steps):
    assert make_execution(batch, micro_batch_size=micro).accumulation_steps == steps


def test_waiting_is_that_of_the_epochs_after_the_first_which_compiles():
    epochs = make_epochs((0.8, 0.9, 0.9), train_s=2.0, data_wait_s=1.0)
    compiling = dataclasses.replace(epochs[0], train_s=60.0)
    run = make_execution(train_s=64.0, data_wait_s=3.0, epochs=(compiling, *epochs[1:]))
    assert run.data_wait_share == 0.5
    alone = make_execution(train_s=60.0, data_wait_s=1.0, epochs=(compiling,))
    assert alone.data_wait_share == pytest.approx(1 / 60)
    unknown = make_epochs((0.8, 0.9), data_wait_s=None)
    assert make_execution(data_wait_s=None, epochs=unknown).data_wait_share is None
    assert make_execution(train_s=0.0, epochs=()).data_wait_share is None
