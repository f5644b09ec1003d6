import keras
import pytest
import small_models as models
import tensorflow as tf

from kbatch.errors import PolicyUnsupported
from kbatch.library_internals import excluded_from_decay
from kbatch.training.build_function import model_of
from kbatch.training.dtype_policy import check_active_policy, dtype_policy_scope


def test_dtype_policy_scope_restores_policy_after_error():
    before = keras.config.dtype_policy().name
    with pytest.raises(ZeroDivisionError), dtype_policy_scope("mixed_bfloat16"):
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        raise ZeroDivisionError
    assert keras.config.dtype_policy().name == before


@pytest.mark.parametrize(
    ("policy", "message"),
    [("float32", "policy of the model='float32'"), ("mixed_float16", "auto_scale_loss=False")],
)
def test_check_active_policy_refuses_other_policy_and_missing_loss_scale(policy, message):
    with dtype_policy_scope(policy):
        model = models.mlp(auto_scale_loss=False)
    with pytest.raises(ValueError, match=message):
        check_active_policy(model, "mixed_float16")


HALF, FULL = tf.constant([1.0], tf.float16), tf.constant([1.0])
UNSUPPORTED = {
    "add": tf.function(lambda: HALF + FULL),
    "top k": lambda: tf.math.in_top_k([0], HALF[None], 1),
    "loop": lambda: tf.while_loop(
        lambda x: x < 2, lambda x: x + tf.cast(FULL, x.dtype) * FULL, [HALF]
    ),
}


@pytest.mark.parametrize("compute", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_dtype_policy_scope_names_half_precision_errors(compute):
    named = pytest.raises(PolicyUnsupported, match=r"under mixed_float16.*Received: ")
    with named, dtype_policy_scope("mixed_float16"):
        compute()
    with pytest.raises(Exception, match=r".") as other, dtype_policy_scope("float32"):
        compute()
    assert not isinstance(other.value, PolicyUnsupported)


def out_of_memory():
    text = "OOM when allocating tensor with shape[8] and type half on GPU:0"
    raise tf.errors.ResourceExhaustedError(None, None, text)


def another_shape():
    keras.layers.Dense(2, dtype="mixed_float16").build((None, 8))
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])(tf.ones([1, 7]))


@pytest.mark.parametrize("fail", [out_of_memory, another_shape])
def test_dtype_policy_scope_keeps_other_errors(fail):
    with pytest.raises(Exception, match=r".") as found, dtype_policy_scope("mixed_float16"):
        fail()
    assert not isinstance(found.value, PolicyUnsupported)


def set_after_compile(model):
    optimizer = model.optimizer
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.exclude_from_weight_decay(var_list=model.trainable_weights[:1])
    optimizer.clipnorm, optimizer.use_ema, optimizer.beta_2 = 0.5, True, 0.9
    optimizer.weight_decay, optimizer.learning_rate = 0.1, 0.25
    return model


@pytest.mark.parametrize("given", ["build", "model"])
def test_settings_after_compile_apply_under_mixed_float16(given):
    def build():
        return set_after_compile(models.mlp(optimizer=keras.optimizers.AdamW()))

    found = []
    for policy in ("float32", "mixed_float16"):
        with dtype_policy_scope(policy):
            model = model_of(build if given == "build" else build(), {}, policy)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        excluded = excluded_from_decay(optimizer, model.trainable_weights)
        config = optimizer.get_config()
        found.append((excluded, {name: config[name] for name in config if name != "name"}))
    assert found[0][0] == [0]
    assert found[0] == found[1]
