"""The columns and rows of a study's table, and the conditions of its trials."""

import pytest
from records_factory import (
    make_diverged,
    make_epochs,
    make_execution,
    make_gpu,
    make_study,
    make_trial,
    make_usage,
    with_moments,
)

from kbatch.analysis.intervals import mean_interval
from kbatch.records.training_run import Budget, Target
from kbatch.study.compared_trials import conditions
from kbatch.study.trial import Objective

ENDS = ("", ", low", ", high")


def column(study, name):
    return study.table()[name].tolist()


def ranged(study, name, row=0):
    return [study.table()[f"{name}{end}"][row] for end in ENDS]


def test_table_has_row_for_each_size():
    table = make_study().table()
    assert column(make_study(), "batch size") == [16, 32, 64, 128, 256, 512, 4096]
    assert table.attrs["answer"] == [2]
    assert table["verdict"][2] == "take"
    assert table["verdict"][6] == "out of memory"
    assert (
        table["verdict"][4]
        == "less accurate by 0.031 at learning rate 0.001 (not certain), 1.9 times as fast"
    )


def test_table_intervals():
    values = (0.9, 0.91, 0.91)
    study = make_study(make_trial(64, *(make_execution(accuracies=(v,)) for v in values)))
    interval = mean_interval(values)
    expected = (interval.value, interval.low, interval.high)
    assert ranged(study, "judged (95 % interval)") == pytest.approx(expected)
    single = ranged(make_study(make_trial(64)), "samples/s")
    assert single[1] < single[0] < single[2]


@pytest.mark.parametrize(
    ("trial", "outcome"),
    [
        (make_trial(64, status="out_of_memory"), "out of memory"),
        (make_trial(64, status="failed"), "failed: ValueError: the loss is not finite"),
        (make_trial(64, status="running"), "running"),
        (make_diverged(64), "diverged at learning rate 0.001"),
    ],
)
def test_table_of_incomplete_trial(trial, outcome):
    table = make_study(trial, make_trial(128)).table()
    assert table["verdict"][0] == outcome
    assert table[["samples/s", "val_accuracy"]].isna().loc[0].all()


def test_table_has_column_for_each_difference():
    study = make_study(
        make_trial(16, hyperparameters={"units": 8, "drop": 0.5, "tuner/epochs": 1}),
        make_trial(32, hyperparameters={"units": 1600, "drop": 0.5, "tuner/epochs": 2}),
        make_trial(512, hyperparameters={"units": 8, "drop": 0.5}, micro_batch_size=64),
    )
    assert column(study, "units") == [8, 1600, 8]
    assert study.table()["micro-batch size"][2] == 64
    assert {"drop", "tuner/epochs", "dtype policy"}.isdisjoint(study.table().columns)


def test_table_gpu_columns():
    study = make_study(
        make_trial(16, usage=make_usage(make_gpu(energy_j=3 * 2874.0, utilization=0.876))),
        make_trial(32, usage=make_usage(make_gpu(energy_j=None))),
        make_trial(64),
    )
    assert column(study, "energy (J/sample)")[0] == pytest.approx(3.0)
    assert column(study, "GPU utilization (%)")[:2] == pytest.approx([87.6, 80.0])
    assert list(study.table()["energy (J/sample)"].isna()) == [False, True, True]
    assert not [name for name in make_study().table().columns if "GPU" in name]


def test_table_noise_scale_column():
    def measured(size, norms):
        pairs = [(90.0, norm) for norm in norms]
        return make_trial(size, epochs=with_moments(make_epochs([0.9] * 4), pairs))

    resolved, lost = measured(16, (3.0, 3.1, 2.9, 3.0)), measured(32, (0.3, -0.3, 0.2, -0.1))
    study = make_study(resolved, lost, make_trial(64))
    name, scale = "noise scale (examples)", resolved.noise_scale
    assert ranged(study, name) == [scale.value, *scale.ends]
    assert list(study.table()[name].isna()) == [False, True, True]
    assert name not in make_study().table().columns
    known = study.to_dataframe()[["noise_scale", "noise_scale_low", "noise_scale_high"]]
    assert known.iloc[0].tolist() == [scale.value, *scale.ends]
    assert known.iloc[1].isna().tolist() == [True, lost.noise_scale.low is None, True]


def test_conditions_count_epochs_of_compared_trials():
    other = make_trial(16, accuracies=[0.9] * 2, trial_id="1", hyperparameters={"units": 8})
    study = make_study(other, *(make_trial(size, accuracies=[0.95] * 4) for size in (16, 64)))
    assert "· 4 epochs of 1,437 examples" in study.settings["compared"]


def test_texts_of_time_to_target():
    aim = {"target": Target("val_accuracy", 0.95, "max"), "budget": Budget(train_s=60.0)}
    aim["objective"] = Objective("seconds_to_target", "min")
    curves = {16: (0.5, 0.9, 0.96), 64: (0.5, 0.97), 256: (0.5, 0.6)}
    study = make_study(
        *(
            make_trial(size, epochs=make_epochs(curve, updates=10, train_s=0.5), **aim)
            for size, curve in curves.items()
        )
    )
    until = "until val_accuracy ≥ 0.95, at most 60 s of training"
    assert f"{until} (2 to 3 epochs)" in conditions(study.trials, study.environment)
    assert study.answer == "Train with batch size 64 and learning rate 0.001."
    table = study.table().set_index("batch size")
    assert list(table["seconds_to_target (95 % interval)"][:2]) == [1.5, 1.0]
    assert table["verdict"][256] == "never met the target"
    assert table["seconds_to_target (95 % interval)"].isna()[256]
