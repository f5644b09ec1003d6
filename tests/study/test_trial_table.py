import dataclasses

import pytest
from records_factory import (
    make_diverged,
    make_execution,
    make_gpu,
    make_study,
    make_trial,
    make_usage,
)

from kbatch.study.study import Study
from kbatch.study.table import trial_table


def column(study, title):
    table = trial_table(study)
    return [row.texts[table.headers.index(title)] for row in table.rows]


def test_without_a_spread_a_number_stands_alone():
    short = make_trial(16, window_examples=(100,), window_durations_s=(0.1,))
    pair = make_trial(32, *(make_execution(32, accuracies=(a,)) for a in (0.5, 0.7)))
    study = make_study(short, pair)
    assert column(study, "Samples/s") == ["1,000", "1,000"]
    assert column(study, "Validation accuracy") == ["0.9700", "0.6000"]
    footnote = trial_table(study).footnote
    assert "Two executions have a mean and no interval." in footnote
    assert "±" not in footnote
    assert "quartile" not in footnote


def test_a_diverged_trial_says_so():
    study = make_study(make_diverged(16))
    assert column(study, "Status") == ["diverged"]
    assert column(study, "Samples/s") == ["n/a (diverged)"]


def test_every_row_has_a_cell_a_column():
    table = trial_table(make_study())
    assert len(table.rows) == 7
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}
    assert [row.best for row in table.rows].index(True) == 2


def test_numbers_are_short_and_show_their_spread():
    assert column(make_study(make_trial(4096, rate=12345)), "Samples/s") == [
        "12,300 (12,200 to 12,500)"
    ]
    repeated = make_trial(
        64,
        *(
            make_execution(rate=r, accuracies=(a,))
            for r, a in ((1000, 0.9), (1010, 0.91), (1010, 0.91))
        ),
    )
    # Half of the interval of three values 0, d and d: 4.303 d / 3.
    assert column(make_study(repeated), "Samples/s") == ["1,010 ± 14"]
    assert column(make_study(repeated), "Validation accuracy") == ["0.9067 ± 0.014"]
    assert column(make_study(), "Batch size")[-1] == "4,096"
    assert column(make_study(), "Learning rate")[0] == "0.001"


@pytest.mark.parametrize(
    ("status", "reason"),
    [("out_of_memory", "out of memory"), ("failed", "failed"), ("running", "running")],
)
def test_a_missing_value_says_why(status, reason):
    study = make_study(make_trial(64, status=status), make_trial(128))
    for title in ("Samples/s", "Validation accuracy", "Updates", "First step (s)"):
        assert column(study, title)[0] == f"n/a ({reason})"
    assert column(study, "Status")[0] == reason
    text = " ".join(" ".join(row.texts) for row in trial_table(study).rows).lower()
    assert "nan" not in text
    assert "none" not in text


def test_a_value_that_was_not_measured_says_so():
    study = make_study(make_trial(64, data_wait_s=None, learning_rate=None, epochs=()))
    assert column(study, "Waiting for data") == ["n/a (not measured)"]
    assert column(study, "Learning rate") == ["n/a (not measured)"]


def test_updates_that_overflowed_stand_in_the_table_where_there_are_any():
    study = make_study(make_trial(64, overflowed_updates=3), make_trial(128, overflowed_updates=0))
    assert column(study, "Overflowed updates") == ["3", "0"]
    none = make_study(make_trial(64, overflowed_updates=0), make_trial(128))
    assert "Overflowed updates" not in trial_table(none).headers


def test_hyperparameters_stand_in_the_table_where_they_differ():
    study = make_study(
        make_trial(16, hyperparameters={"units": 8, "drop": 0.5, "tuner/epochs": 1}),
        make_trial(32, hyperparameters={"units": 1600, "drop": 0.5, "tuner/epochs": 2}),
    )
    assert column(study, "units") == ["8", "1,600"]
    assert {"drop", "tuner/epochs"}.isdisjoint(trial_table(study).headers)


GPU_COLUMNS = {"GPU utilization", "Joules per sample"}


def test_what_was_measured_of_the_gpus_stands_in_the_table_where_it_is_known():
    study = make_study(
        make_trial(16, usage=make_usage(make_gpu(energy_j=3 * 2874.0, utilization=0.876))),
        make_trial(32, usage=make_usage(make_gpu(energy_j=None))),
        make_trial(64),
        make_trial(128, status="out_of_memory"),
    )
    known, unknown = "n/a (not measured)", "n/a (out of memory)"
    assert column(study, "Joules per sample") == ["3.00", known, known, unknown]
    assert column(study, "GPU utilization") == ["88 %", "80 %", known, unknown]
    assert "whole run" in trial_table(study).footnote
    assert "MIG" not in trial_table(study).footnote


def test_the_energy_of_an_instance_of_a_gpu_is_said_to_be_the_boards():
    instance = dataclasses.replace(make_gpu(), mig=True)
    study = make_study(make_trial(16, usage=make_usage(make_gpu(), instance)))
    assert "(MIG) the energy is the whole board's" in trial_table(study).footnote


@pytest.mark.parametrize("usage", [None, make_usage()])
def test_without_gpus_there_is_no_column_of_them(usage):
    study = make_study(make_trial(16, usage=usage))
    assert GPU_COLUMNS.isdisjoint(trial_table(study).headers)
    assert "NVML" not in trial_table(study).footnote


def test_the_footnote_explains_the_spreads_that_are_there():
    single = make_study(make_trial(64))
    repeated = make_study(make_trial(64, *[make_execution()] * 3))
    assert "quartile" in trial_table(single).footnote
    assert "±" not in trial_table(single).footnote
    assert "95 %" in trial_table(repeated).footnote
    assert "quartile" not in trial_table(repeated).footnote


def test_an_empty_study_is_refused():
    with pytest.raises(ValueError, match=r"tuner\.search"):
        trial_table(Study("digits", ()))
