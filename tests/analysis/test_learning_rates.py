import itertools

import numpy as np
import pytest

from kbatch.analysis.learning_rate import (
    check_rule,
    learning_rate_ratio,
    scale_beta_2,
    scale_learning_rate,
)

RULES = [
    {"rule": "linear"},
    {"rule": "sqrt"},
    {"rule": None},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("a", "b", "c"), list(itertools.permutations([1, 24, 1000])))
def test_two_steps_give_the_same_as_one(rule, a, b, c):
    through = scale_learning_rate(
        scale_learning_rate(0.1, batch_size=b, base_batch_size=a, **rule),
        batch_size=c,
        base_batch_size=b,
        **rule,
    )
    direct = scale_learning_rate(0.1, batch_size=c, base_batch_size=a, **rule)
    np.testing.assert_allclose(through, direct)


@pytest.mark.parametrize("rule", RULES)
def test_the_base_size_keeps_its_learning_rate(rule):
    assert scale_learning_rate(0.3, batch_size=48, base_batch_size=48, **rule) == 0.3


def test_a_rule_has_a_name():
    with pytest.raises(ValueError, match=r"'sqrt' .*scaling='cubic'"):
        check_rule("cubic", "scaling")


def test_without_a_rule_every_size_keeps_the_learning_rate():
    assert scale_learning_rate(0.3, batch_size=4096, base_batch_size=1, rule=None) == 0.3


def test_the_square_root_rule_squared_is_the_linear_rule():
    sizes = {"batch_size": 96, "base_batch_size": 32}
    assert learning_rate_ratio(**sizes, rule="linear") == 3
    np.testing.assert_allclose(learning_rate_ratio(**sizes, rule="sqrt") ** 2, 3)


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match=r"`rule` must be .*rule='cubic'"):
        scale_learning_rate(0.1, batch_size=2, base_batch_size=1, rule="cubic")


@pytest.mark.parametrize(("batch_size", "base_batch_size"), [(0, 8), (8, 0), (-8, 8)])
def test_sizes_must_be_positive(batch_size, base_batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}"):
        scale_learning_rate(
            0.1, batch_size=batch_size, base_batch_size=base_batch_size, rule="linear"
        )


@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9, 0.95])
def test_beta_2_stays_above_the_square_of_beta_1(beta_1):
    """Below it Adam is unstable (arXiv:2603.02092); what is given below it is not lowered."""
    for batch_size in (64, 1024, 2**20):
        sizes = {"batch_size": batch_size, "base_batch_size": 64}
        assert beta_1**2 < scale_beta_2(0.999, beta_1, **sizes) <= 0.999
        assert scale_beta_2(beta_1**2 / 2, beta_1, **sizes) == beta_1**2 / 2
