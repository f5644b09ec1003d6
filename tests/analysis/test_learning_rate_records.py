import numpy as np
import pytest

from kbatch.analysis.learning_rate_records import learning_rate_scaling
from kbatch.analysis.learning_rates import scale_beta_2, scale_learning_rate

SIZES = {"batch_size": 256, "base_batch_size": 64}


@pytest.mark.parametrize("rule", ["linear", "sqrt", "noise", None])
@pytest.mark.parametrize("beta_2", [None, 0.99])
def test_the_record_holds_what_the_rule_gives(rule, beta_2):
    scaling = learning_rate_scaling(0.1, beta_2, **SIZES, rule=rule, noise_scale=100.0)
    expected = scale_learning_rate(
        0.1, **SIZES, rule=rule, noise_scale=100.0, adaptive=beta_2 is not None
    )
    assert scaling.learning_rate == expected
    np.testing.assert_allclose(0.1 * scaling.learning_rate_ratio, expected)
    assert (scaling.rule, scaling.batch_size, scaling.base_batch_size) == (rule, 256, 64)
    assert scaling.kappa == 4


@pytest.mark.parametrize("rule", ["linear", "sqrt", "noise"])
def test_adams_half_life_follows_every_rule(rule):
    scaling = learning_rate_scaling(0.1, 0.99, **SIZES, rule=rule, noise_scale=100.0)
    assert scaling.beta_2 == scale_beta_2(0.99, **SIZES)


def test_without_a_rule_nothing_changes():
    scaling = learning_rate_scaling(0.1, 0.99, **SIZES, rule=None)
    assert (scaling.learning_rate, scaling.beta_2) == (0.1, 0.99)


def test_a_noise_scale_is_recorded_where_it_was_used():
    used, unused = (
        learning_rate_scaling(0.1, **SIZES, rule=rule, noise_scale=100.0)
        for rule in ("noise", "linear")
    )
    assert (used.noise_scale, unused.noise_scale) == (100.0, None)
    assert used.beta_2 is None


def test_the_noise_rule_without_a_noise_scale_is_refused():
    with pytest.raises(ValueError, match="noise_scale=None"):
        learning_rate_scaling(0.1, **SIZES, rule="noise")
