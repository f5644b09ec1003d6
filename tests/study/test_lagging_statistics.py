"""The note where validation accuracy shows how far moving statistics came."""

import pytest
from records_factory import make_epochs, make_study, make_trial

from kbatch.analysis.learning_rate import learning_rate_scaling
from kbatch.study.caveats import caveats


def noted(
    *, training=0.88, validation=0.20, updates=40, momenta=(0.9, 0.99), scaled=True, averages=False
):
    scaling = learning_rate_scaling(
        0.1,
        batch_size=256,
        base_batch_size=256,
        rule=None,
        batch_norm_momenta=momenta,
        ema_momentum=0.995,
    )
    (epoch,) = make_epochs((validation,))
    epoch.metrics["accuracy"] = training
    trial = make_trial(
        256,
        epochs=(epoch,),
        updates=updates,
        scaling=scaling if scaled else None,
        averages_validated=averages,
    )
    found = caveats(make_study(trial, make_trial(32)))
    return [note.values for note in found if note.code == "lagging_statistics"]


def test_the_note_says_how_many_updates_came_and_over_how_many_statistics_average():
    (values,) = noted()
    assert (values["sizes"], values["at"]) == ("batch size 256", "256")
    assert (values["training"], values["validation"]) == ("0.880", "0.200")
    assert (values["updates"], values["memory"]) == ("40 updates", "100")


def test_averages_of_weights_that_were_validated_lag_too():
    (values,) = noted(averages=True, updates=400)
    assert (values["updates"], values["memory"]) == ("400 updates", "200")
    assert values["cure"] == "`ema_momentum`"


@pytest.mark.parametrize(
    "changed",
    [
        {"validation": 0.80},
        {"updates": 500},  # The averages were not validated.
        {"momenta": (0.5,)},
        {"momenta": ()},
        {"momenta": (1.0,)},
        {"scaled": False},
    ],
)
def test_without_a_gap_or_a_lag_there_is_none(changed):
    assert noted(**changed) == []
