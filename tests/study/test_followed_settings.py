import dataclasses

import pytest
from recommendation_factory import make_check, make_recommendation
from records_factory import make_study, make_trial

from kbatch.analysis.learning_rate import learning_rate_scaling
from kbatch.recommendation.report import settings_line
from kbatch.report.content import report_content
from kbatch.study.table import followed_text, trial_table

SETTINGS = {"weight_decay": 0.01, "batch_norm_momenta": (0.9, 0.99)}


def scalings(sizes=(32, 64, 128), beta_2=0.999, **changed):
    fields = {"base_batch_size": 32, "rule": "sqrt", **SETTINGS} | changed
    return [learning_rate_scaling(0.1, beta_2, batch_size=size, **fields) for size in sizes]


def test_the_table_says_what_followed_and_from_which_value_to_which():
    trials = [make_trial(s.batch_size, scaling=s) for s in scalings()]
    assert trial_table(make_study(*trials)).footnote.endswith(
        "Settings that follow the batch size, from 32 to 128: `beta_2` (0.999 to 0.996), weight "
        "decay (0.01 to 0.02) and BatchNormalization's momentum (0.9 and 0.99 to 0.656 and 0.961)."
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
    assert (
        text == "Settings that follow the batch size, from 32 to 128: weight decay (0.01 to 0.02)."
    )


def recommended(**changed):
    checks = zip((64, 128), (270, 140), scalings((64, 128), **changed), strict=True)
    return make_recommendation(
        checks=tuple(
            dataclasses.replace(make_check(size, updates), scaling=scaling)
            for size, updates, scaling in checks
        )
    )


def test_a_size_is_recommended_with_the_settings_that_it_was_trained_with():
    found = recommended()
    line = (
        "Set `beta_2` to 0.996, weight decay to 0.02 and BatchNormalization's momentum to 0.656 "
        "and 0.961 as well: batch size 128 was trained like this."
    )
    assert settings_line(found) == [line]
    assert line in " ".join(str(found).split())
    assert line in report_content(found).sections[0].lead
    assert settings_line(recommended(follow_batch_size=())) == []
    assert settings_line(make_recommendation()) == []
