"""The noise scale in tables and reports."""

import dataclasses

import pytest
from records_factory import make_epochs, make_execution, make_study, make_trial

from kbatch.analysis.intervals import Estimate
from kbatch.study.caveats import caveats
from kbatch.study.names import noise_scale_text
from kbatch.study.table import trial_table

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
    table = trial_table(study)
    cells = [row.cells[table.headers.index("Noise scale")] for row in table.rows]
    assert cells[0].text == noise_scale_text(study.trials[0].noise_scale)
    assert cells[0].sort_key == study.trials[0].noise_scale.value
    assert cells[1].text.startswith("n/a (unresolved: at least ")
    assert cells[2].text == "n/a (not measured)"
    assert "Noise scale: in examples" in table.footnote
    assert "Noise scale" not in trial_table(make_study()).headers
    assert "Noise scale" not in trial_table(make_study()).footnote


def test_the_report_says_what_is_disputed_for_adam():
    study = make_study(trial(16, STEADY))
    (doubt,) = [c.text for c in caveats(study) if "arXiv:2505.23971" in c.text]
    assert "under Adam is disputed" in doubt
    assert doubt in study.page().notes


def test_sgd_has_the_noise_scale_it_was_derived_for():
    texts = [c.text for c in caveats(make_study(trial(16, STEADY, optimizer="SGD")))]
    assert any("noise scale" in text for text in texts)
    assert not any("disputed" in text for text in texts)
    assert not any("noise scale" in c.text for c in caveats(make_study()))
