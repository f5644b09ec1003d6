import dataclasses
import itertools
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

USAGE = {"joules_to_target": 4311.0, "joules_per_sample": 1.5, "gpu_energy_j": 4311.0}
USAGE |= {"gpu_power_w": 300.0, "gpu_utilization": 0.8}


def test_to_dataframe_columns_are_documented():
    columns = list(make_study().to_dataframe().columns)
    assert columns[32:] == ["loss", "val_accuracy", "val_loss", "val_accuracy_judged"]
    words = re.findall(r"`(\w+)`", Study.to_dataframe.__doc__.split("Returns:")[0])
    for i, word in enumerate(words):  # `_high` is the name before it with another ending.
        words[i] = words[i - 1].replace("_low", "_high") if word == "_high" else word
    assert columns[:32] == words
    runs = list(make_study().runs_to_dataframe().columns)
    assert [name for name in runs if name not in columns] == ["run", "seed", "length"]
    assert [name for name in columns if name not in runs] == ["executions"]


def test_runs_to_dataframe_has_row_for_each_run():
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


def test_to_dataframe_gpu_usage():
    met = {"target": Target("val_accuracy", 0.9, "max"), "accuracies": (0.8, 0.95)}
    usages = [make_usage(make_gpu(energy_j=energy_j)) for energy_j in (2874.0, 5748.0)]
    runs = [make_execution(16, usage=usage, **met) for usage in usages]
    study = make_study(make_trial(16, *runs), make_trial(32))
    known, unknown = study.to_dataframe()[[*USAGE]].to_dict("records")
    assert known == USAGE
    assert all(math.isnan(value) for value in unknown.values())
    assert study.runs_to_dataframe()["joules_per_sample"].tolist()[:2] == [1.0, 2.0]


def test_joules_to_target_needs_end_at_target():
    given = {"target": Target("val_accuracy", 0.9, "max"), "usage": make_usage(make_gpu())}
    for accuracies in ((0.8,), (0.95, 0.96), (0.95, 0.8)):
        run = make_execution(accuracies=accuracies, **given)
        assert run.usage.gpu_energy_j is not None and run.joules_to_target is None


def test_to_dataframe_is_mean_of_runs():
    curves = {1000: (0.9,), 1200: (0.8, 0.98), 1300: (0.7, 0.8, 0.9)}
    runs = [make_execution(rate=rate, accuracies=curve) for rate, curve in curves.items()]
    study = make_study(make_trial(64, *runs))
    row, rows = study.to_dataframe().iloc[0], study.runs_to_dataframe()
    for column in ("val_accuracy", "updates", "epochs", "data_wait_share"):
        np.testing.assert_allclose(row[column], rows[column].mean())
    seconds = rows["examples_seen"] / rows["samples_per_second"]  # As in the table of the study.
    expected = rows["examples_seen"].sum() / seconds.sum()
    np.testing.assert_allclose(row["samples_per_second"], expected)
    np.testing.assert_allclose(study.table()["training time (s)"], seconds.mean())
    ends = [row["samples_per_second_low"], row["samples_per_second_high"]]
    logs = mean_interval(np.log([*curves]))
    ratios = np.exp(np.subtract(logs.ends, logs.value))
    np.testing.assert_allclose(ends, row["samples_per_second"] * ratios)


def test_tables_have_initial_learning_rate():
    (epoch,) = make_epochs((0.9,))
    lowered = dataclasses.replace(epoch, learning_rate=1e-5)  # By a callback.
    study = make_study(make_trial(64, epochs=(lowered,)))
    assert study.to_dataframe()["learning_rate"][0] == study.table()["learning rate"][0] == 0.001


def test_samples_per_second_without_pause():
    trial = make_trial(64, window_examples=(100,) * 9, window_durations_s=(0.1,) * 8 + (3.7,))
    assert trial.samples_per_second == trial.executions[0].samples_per_second == pytest.approx(1000)
    study = make_study(trial)
    for table in (study.to_dataframe(), study.runs_to_dataframe()):
        assert table["samples_per_second"].tolist() == [pytest.approx(1000)]


@pytest.mark.parametrize(
    ("accuracies", "low", "high"), [((0.5, 0.99, 0.8), None, 1), ((0.01, 0.4, 0.2), 0, None)]
)
def test_metric_interval_ends_at_0_and_1(accuracies, low, high):
    found = make_trial(64, *(make_execution(accuracies=(a,)) for a in accuracies))
    raw, ends = mean_interval(accuracies), found.metric("val_accuracy").ends
    assert ends == (raw.low if low is None else low, raw.high if high is None else high)
    pair = make_trial(64, make_execution(rate=1000), make_execution(rate=1200))
    assert (pair.throughput.value, pair.throughput.ends) == (1100, None)
    wild = make_trial(32, *(make_execution(32, rate=rate) for rate in (100.0, 200.0, 3000.0)))
    assert 0 < wild.throughput.low < 100
    single = make_trial(64, window_examples=(100,), window_durations_s=(0.1,))
    assert (single.throughput.value, single.throughput.ends) == (1000, None)


def test_judged_value_is_mean_of_outcomes():
    values = (0.94, 0.95, 0.96)
    outcomes = Outcomes(metric="val_accuracy", values=values, key="k", examples=3)
    trial = make_trial(64, outcomes=outcomes)  # Its best epoch has 0.97.
    assert trial.judged_value == pytest.approx(0.95)
    assert trial.metrics["val_accuracy"] == 0.97
    # Both have an interval over the examples.
    for found, value in ((trial.judged(), 0.95), (trial.metric("val_accuracy"), 0.97)):
        ends = (value - 0.0248, value, value + 0.0248)
        assert (found.low, found.value, found.high) == pytest.approx(ends, abs=1e-4)
    # The best epoch is chosen by single epochs.
    assert trial.best_objective_value() == 0.97
    # Without outcomes, a value that a custom `fit` returned decides.
    own = make_trial(64, reported={"val_accuracy": 0.8})
    assert (own.judged_value, own.metrics["val_accuracy"]) == (0.8, 0.8)
    zero = dataclasses.replace(outcomes, values=(0.0, 0.0))
    assert make_trial(64, outcomes=zero).judged_value == 0.0


def test_metrics_leave_out_values_not_finite():
    trial = make_trial(64, epochs=make_epochs((math.nan, 0.9, math.inf)))
    assert trial.executions[0].best_epoch("val_accuracy", "max").epoch == 1
    assert trial.judged_value == 0.9
    lost = make_trial(64, epochs=make_epochs((math.nan,)))
    assert (lost.metrics, lost.judged_value) == ({}, None)


def test_to_dataframe_names_do_not_collide():
    epoch = EpochRecord(0, {"loss": 0.1, "val_accuracy": 0.5, "updates": 3.5}, 64, 1, 0.1, None)
    tuned = {"learning_rate": 0.5, "loss": "mse", "units": 8}
    trial = make_trial(64, hyperparameters=tuned, epochs=(epoch,), updates=1)
    row = make_study(trial).to_dataframe().iloc[0]
    assert (row["learning_rate"], row["updates"], row["val_accuracy"]) == (0.001, 1, 0.5)
    assert (row["hp/learning_rate"], row["hp/loss"], row["units"]) == (0.5, "mse", 8)


@pytest.mark.parametrize(("direction", "value", "epoch"), [("max", 0.97, 1), ("min", 0.8, 2)])
def test_metrics_are_of_best_epoch(direction, value, epoch):
    objective = Objective("val_accuracy", direction)
    trial = make_trial(64, objective=objective, accuracies=(0.9, 0.97, 0.8, 0.97))
    assert trial.metrics["val_accuracy"] == value
    assert trial.last.best_epoch("val_accuracy", direction).epoch == epoch


def test_quality_metric():
    loss, rate = Objective("val_loss", "min"), Objective("samples_per_second", "max")
    assert make_study(make_trial(objective=loss)).quality_metric == loss
    quality = make_study(make_trial(objective=rate)).quality_metric
    assert quality == Objective("val_accuracy", "max")


def test_trial_status_is_worst_of_runs():
    worst_first = ("running", "interrupted", "out_of_memory", "failed", "completed")
    for worse, better in itertools.pairwise(worst_first):
        trial = make_trial(64, *(make_execution(status=status) for status in (better, worse)))
        assert trial.status == worse


@pytest.mark.parametrize(("batch", "micro", "steps"), [(100, 32, 4), (8, 8, 1)])
def test_accumulation_steps_include_remainder(batch, micro, steps):
    assert make_execution(batch, micro_batch_size=micro).accumulation_steps == steps


def test_data_wait_share_leaves_out_first_epoch():
    epochs = make_epochs((0.8, 0.9, 0.9), train_s=2.0, data_wait_s=1.0)
    compiling = dataclasses.replace(epochs[0], train_s=60.0)
    run = make_execution(train_s=64.0, data_wait_s=3.0, epochs=(compiling, *epochs[1:]))
    assert run.data_wait_share == 0.5
    alone = make_execution(train_s=60.0, data_wait_s=1.0, epochs=(compiling,))
    assert alone.data_wait_share == pytest.approx(1 / 60)
    unknown = make_epochs((0.8, 0.9), data_wait_s=None)
    assert make_execution(data_wait_s=None, epochs=unknown).data_wait_share is None
    assert make_execution(train_s=0.0, epochs=()).data_wait_share is None
