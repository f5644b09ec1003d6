"""The noise scale in tables and reports."""

import dataclasses

import pytest
from records_factory import make_epochs, make_execution, make_study, make_trial

from kbatch.analysis.intervals import Estimate
from kbatch.study.figures.noise_scale import noise_scale_text

STEADY = ([90.0, 91.0, 89.0, 90.5], [3.0, 3.1, 2.9, 3.0])
LOST = ([90.0, 91.0, 89.0, 90.5], [0.3, -0.3, 0.2, -0.1])


def trial(batch_size, moments, **changed):
    epochs = tuple(
        dataclasses.replace(
            epoch, metrics=epoch.metrics | {"gradient_variance": s, "gradient_squared_norm": g}
        )
        for epoch, s, g in zip(make_epochs([0.9] * 4), *moments, strict=True)
    )
    return make_trial(batch_size, make_execution(batch_size, epochs=epochs, **changed))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Estimate(95.04, 70.2, 131.0), "95 (70 to 130)"),
        (Estimate(0.0, 0.0, 1.2), "0 (0 to 1.2)"),
        (Estimate(None, 212.0), "n/a (unresolved: at least 210)"),
        (Estimate(None), "n/a (unresolved)"),
    ],
)
def test_its_words(found, text):
    assert noise_scale_text(found) == text


def test_a_column_where_it_was_measured():
    study = make_study(trial(16, STEADY), trial(32, LOST), make_trial(64))
    table, found = study.table(), study.trials[0].noise_scale
    name = "noise scale (examples)"
    assert tuple(table.loc[0, [name, f"{name}, low", f"{name}, high"]]) == (
        found.value,
        *found.ends,
    )
    assert list(table[name].isna()) == [False, True, True]
    assert table[f"{name}, low"][1] > 0
    assert name not in make_study().table().columns
