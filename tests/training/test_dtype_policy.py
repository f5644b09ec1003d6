import keras
import pytest
import small_models as models

from kbatch.training.dtype_policy import (
    check_active_policy,
    check_dtype_policies,
    dtype_policy_scope,
)


def test_the_policy_is_put_back_also_after_an_error():
    before = keras.config.dtype_policy().name
    with pytest.raises(ZeroDivisionError), dtype_policy_scope("mixed_bfloat16"):
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        raise ZeroDivisionError
    assert keras.config.dtype_policy().name == before


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="dtype_policy='mixed_float8'"):
        check_dtype_policies("mixed_float8")


def test_another_policy_in_the_model_is_noticed():
    with dtype_policy_scope("float32"):
        model = models.mlp()
    with pytest.raises(ValueError, match="policy of the model='float32'"):
        check_active_policy(model, "mixed_float16")


def test_mixed_float16_without_loss_scale_is_noticed():
    with dtype_policy_scope("mixed_float16"):
        model = models.mlp(auto_scale_loss=False)
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        check_active_policy(model, "mixed_float16")
