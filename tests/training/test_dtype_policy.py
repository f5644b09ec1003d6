import random

import keras
import models
import numpy as np
import pytest

from kbatch.training.dtype_policy import building_under, check_active_policy, check_dtype_policies


def test_policy_and_random_states_are_put_back_also_after_an_error():
    before = keras.config.dtype_policy().name, random.getstate(), np.random.get_state()[1][:5]
    with pytest.raises(ZeroDivisionError), building_under("mixed_bfloat16", 3):
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        random.random(), np.random.random()
        raise ZeroDivisionError
    assert keras.config.dtype_policy().name == before[0]
    assert random.getstate() == before[1]
    np.testing.assert_array_equal(np.random.get_state()[1][:5], before[2])


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_gives_the_same_weights(seed):
    def weights():
        with building_under("float32", seed):
            return models.mlp().get_weights()[0]

    np.testing.assert_array_equal(weights(), weights())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="dtype_policy='mixed_float8'"):
        check_dtype_policies("mixed_float8")


def test_another_policy_in_the_model_is_noticed():
    with building_under("float32", None):
        model = models.mlp()
    with pytest.raises(ValueError, match="policy of the model='float32'"):
        check_active_policy(model, "mixed_float16")


def test_mixed_float16_without_loss_scale_is_noticed():
    with building_under("mixed_float16", None):
        model = models.mlp(auto_scale_loss=False)
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        check_active_policy(model, "mixed_float16")
