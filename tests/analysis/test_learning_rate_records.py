import numpy as np
import pytest

from kbatch.analysis.learning_rate import (
    FOLLOWERS,
    learning_rate_scaling,
    scale_beta_2,
    scale_learning_rate,
)

SIZES = {"batch_size": 256, "base_batch_size": 64}


@pytest.mark.parametrize("rule", ["linear", "sqrt", None])
@pytest.mark.parametrize("beta_2", [None, 0.99])
def test_the_record_holds_what_the_rule_gives(rule, beta_2):
    scaling = learning_rate_scaling(0.1, beta_2, **SIZES, rule=rule)
    expected = scale_learning_rate(0.1, **SIZES, rule=rule)
    assert scaling.learning_rate == expected
    np.testing.assert_allclose(0.1 * scaling.learning_rate_ratio, expected)
    assert (scaling.rule, scaling.batch_size, scaling.base_batch_size) == (rule, 256, 64)
    assert scaling.kappa == 4


@pytest.mark.parametrize("rule", ["linear", "sqrt", None])
def test_the_other_settings_follow_under_every_rule_and_none(rule):
    scaling = learning_rate_scaling(
        0.1,
        0.99,
        **SIZES,
        rule=rule,
        weight_decay=0.004,
        batch_norm_momenta=(0.99, 0.9, 0.99),
    )
    assert scaling.beta_2 == scale_beta_2(0.99, **SIZES)
    np.testing.assert_allclose(scaling.weight_decay * scaling.learning_rate, 4 * 0.1 * 0.004)
    np.testing.assert_allclose(scaling.batch_norm_momenta, [0.9**4, 0.99**4])
    assert scaling.follow_batch_size == FOLLOWERS


def test_what_is_not_to_follow_stays():
    settings = {"weight_decay": 0.004, "batch_norm_momenta": (0.99,)}
    scaling = learning_rate_scaling(0.1, 0.99, **SIZES, rule=None, **settings, follow_batch_size=())
    assert (scaling.learning_rate, scaling.beta_2) == (0.1, 0.99)
    assert (scaling.weight_decay, scaling.batch_norm_momenta) == (0.004, (0.99,))
