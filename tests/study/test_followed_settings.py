import pytest
from records_factory import make_study, make_trial

from kbatch.analysis.learning_rate import learning_rate_scaling
from kbatch.study.names import decay_text
from kbatch.study.settings import followed_text

SETTINGS = {"weight_decay": 0.01, "batch_norm_momenta": (0.9, 0.99)}


def scalings(sizes=(32, 64, 128), beta_2=0.999, **changed):
    fields = {"base_batch_size": 32, "rule": "sqrt", **SETTINGS} | changed
    return [learning_rate_scaling(0.1, beta_2, batch_size=size, **fields) for size in sizes]


def test_the_settings_say_what_followed_and_from_which_value_to_which():
    trials = [make_trial(s.batch_size, scaling=s) for s in scalings()]
    assert make_study(*trials).settings["follows the batch size"] == (
        "`beta_2` (0.999 to 0.996), weight decay (0.01 to 0.02) and BatchNormalization's momentum "
        "(0.9 and 0.99 to 0.656 and 0.961), from 32 to 128"
    )


@pytest.mark.parametrize(
    "found",
    [
        [],
        [None],
        scalings(sizes=(32,)),
        scalings(follow_batch_size=()),
        scalings(beta_2=None, weight_decay=None, batch_norm_momenta=()),
    ],
)
def test_nothing_is_said_where_nothing_followed(found):
    assert followed_text(found) == ""


def test_one_of_them_is_said_alone():
    text = followed_text(scalings(follow_batch_size=("weight_decay",)))
    assert text == "weight decay (0.01 to 0.02), from 32 to 128"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.999**0.25, "0.99975"),
        (0.999**0.5, "0.9995"),
        (0.999, "0.999"),
        (0.999**16, "0.984"),
        (0.9**4, "0.656"),
        (1.0, "1"),
    ],
)
def test_a_decay_is_told_from_its_default(value, text):
    assert decay_text(value) == text
