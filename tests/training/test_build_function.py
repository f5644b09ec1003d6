import functools

import keras_tuner
import pytest

from kbatch.training.build_function import as_hypermodel, model_builder
from kbatch.training.model import check_compiled


def with_hp(hp):
    return hp


def with_optional_hp(hp=None):
    return hp


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
        (lambda units=8, *, rate=0.1: None, False),
    ],
)
def test_as_hypermodel_passes_hp_if_function_takes_it(function, takes):
    hp = keras_tuner.HyperParameters()
    assert as_hypermodel(function).build(hp) is (hp if takes else None)


class Hyper(keras_tuner.HyperModel):
    def build(self, hp):
        return hp.Int("units", 4, 8)


@pytest.mark.parametrize(
    "given", [lambda: 4, lambda hp: hp.Int("units", 4, 8), Hyper()], ids=["plain", "hp", "class"]
)
def test_model_builder_uses_default_hyperparameters(given):
    assert model_builder(given)() == 4


def test_model_builder_refuses_wrong_types():
    with pytest.raises(TypeError, match=r"function that builds one,.* Received: 3, a int"):
        model_builder(3)
    with pytest.raises(TypeError, match=r"give `Hyper\(\)`"):
        model_builder(Hyper)


def test_check_compiled_refuses_tf_keras():
    kind = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    with pytest.raises(TypeError, match=r"Keras 3.*tf_keras\.src\.engine\.sequential"):
        check_compiled(kind())
