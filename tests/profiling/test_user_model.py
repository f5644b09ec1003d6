import functools

import keras_tuner
import pytest

from kbatch.profiling.user_model import as_hypermodel


def with_hp(hp):
    return hp


def with_optional_hp(hp=None):
    return hp


def with_options(units=8, *, rate=0.1):
    return None


def without():
    return None


def with_more(model_space, units=8):
    return model_space


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (with_hp, True),
        (with_optional_hp, True),
        (with_more, True),
        (lambda *args: args[0], True),
        (functools.partial(with_more, units=4), True),
        (with_options, False),
        (without, False),
    ],
)
def test_a_build_function_gets_hp_where_it_asks_for_it(function, takes):
    hp = keras_tuner.HyperParameters()
    assert as_hypermodel(function).build(hp) is (hp if takes else None)
