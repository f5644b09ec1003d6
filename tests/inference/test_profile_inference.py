"""The whole of `profile_inference` on small models, for a few seconds each."""

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from shared_worker import shared_worker
from small_models import mlp, rows

import kbatch
from kbatch.errors import InputError, TargetTooLow
from kbatch.inference.result import InferenceProfile

X = rows(32)[0]


def profile(model=None, x=X, **changed):
    arguments = {"batch_sizes": (1, 8, 64), "time_budget_s": 3.0, "measure_memory": False}
    return kbatch.profile_inference(model or mlp(), x, **(arguments | changed))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Several paths and policies with a target, saved and loaded."""
    model = mlp()
    before = model.get_weights()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        found = profile(
            model,
            call_paths=("compiled", "predict"),
            dtype_policies=("float32", "bfloat16"),
            latency_slo_ms=np.float32(10_000),  # Numbers of NumPy are numbers, in its file as well.
            quantile=np.float64(0.95),
            time_budget_s=np.float32(8.0),
        )
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    path = tmp_path_factory.mktemp("profile") / "p.json"
    found.save(path)
    loaded = InferenceProfile.load(path)
    assert loaded == found
    return loaded, told.getvalue()


def test_every_path_and_policy_has_a_record_a_size(whole):
    found, _ = whole
    assert found.series == tuple(
        (path, policy) for policy in ("float32", "bfloat16") for path in ("compiled", "predict")
    )
    assert [t.batch_size for t in found.timings] == [1, 8, 64] * 4
    for timing in found.timings:
        if timing.measured:
            assert timing.first_call_s > 0
            assert len(timing.latencies_s) >= len(timing.times_s) >= 1
        else:
            assert timing.reason.code in ("warm_up_time_spent", "too_slow_to_time")
    first = [t for t in found.timings if (t.call_path, t.dtype_policy) == ("compiled", "float32")]
    assert all(t.measured for t in first)


@pytest.mark.slow
def test_memory_was_measured_for_each_policy_and_size(capsys):
    policies = ("float32", "bfloat16")
    with shared_worker():  # Else a process a policy.
        found = profile(
            dtype_policies=policies,
            measure_memory=True,
            memory_limit_bytes=np.int64(2**28),
            time_budget_s=20.0,  # Memory takes at most a part of it.
        )
    assert {(m.dtype_policy, m.batch_size) for m in found.memory} == {
        (policy, size) for policy in policies for size in (1, 8, 64)
    }
    assert all(m.outcome == "fits" and m.peak_bytes > 0 for m in found.memory)
    assert found.memory_limit_bytes == 2**28
    told = capsys.readouterr().out
    assert "measuring memory in a worker process" in told.splitlines()[0]
    assert "memory of batch 8 under bfloat16: " in told


def test_a_loose_target_is_verified_by_fresh_calls(whole):
    found, told = whole
    answer = found.batch_for(latency_ms=10_000)
    assert (answer.batch_size, answer.verified) == (64, True)
    assert not found.batch_for(latency_ms=9_000, quantile=0.5).verified
    (check,) = found.checks
    assert len(check.latencies_s) >= 59
    assert 0 < found.output_changes["bfloat16"] < 0.1
    for words in ("compiled under float32, size 1: ", "checked batch 64: "):
        assert words in told


def test_default_sizes_are_powers_of_two_until_the_time_ends_them():
    found = kbatch.profile_inference(mlp(), measure_memory=False, time_budget_s=0.5)
    sizes = [t.batch_size for t in found.timings]
    assert sizes == [2**k for k in range(13)]
    assert found.timings[0].measured
    assert [note.code for note in found.noted] == ["inputs_made"]


def test_a_subclassed_model_that_was_never_called_is_built_by_its_data():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    found = profile(Own(), dtype_policies=("float32", "float16"), time_budget_s=0.3)
    assert found.series == (("compiled", "float32"),)
    assert "policy_not_measured" in [note.code for note in found.notes]


def test_want_of_memory_in_a_call_is_a_result():
    class RunsOut(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(self.checked, [x], x.dtype), x.shape)

        def checked(self, x):
            if len(x) > 8:
                raise MemoryError("no memory for that")
            return x

    inputs = keras.Input((X.shape[1],))
    found = profile(keras.Model(inputs, RunsOut()(inputs)), time_budget_s=1.0)
    assert [t.outcome for t in found.timings] == ["measured", "measured", "out_of_memory"]


def of_four_rows():
    inputs = keras.Input(batch_shape=(4, X.shape[1]))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"batch_sizes": (4, 2)}, ValueError, "ascending"),
        ({"latency_slo_ms": -1}, ValueError, "positive number, in milliseconds"),
        ({"quantile": "0.9"}, ValueError, "between 0 and 1"),
        ({"time_budget_s": "5"}, InputError, "time_budget_s"),
        ({"memory_limit_bytes": 0}, ValueError, "at least one MiB"),
        ({"call_paths": "onnx"}, InputError, "call_paths"),
        ({"call_paths": ("predict",), "latency_slo_ms": 5}, InputError, "name another call path"),
        ({"dtype_policies": "float8"}, ValueError, "dtype_polic"),
        ({"dtype_policies": ("float16", "float16")}, InputError, "dtype_polic"),
        ({"bulk_examples": 0}, ValueError, "bulk_examples"),
        ({"model": "model.keras"}, TypeError, "load it first"),
        ({"model": of_four_rows()}, InputError, r"batches of any size.*batches of 4 only"),
        ({"x": X[:, 1:]}, InputError, r"`x` must hold rows.*Received: x with rows"),
        ({"latency_slo_ms": 1e-3}, TargetTooLow, "at least what batch size 1 takes"),
    ],
)
def test_what_cannot_be_measured_is_told(changed, error, message):
    with pytest.raises(error, match=message):
        profile(**changed)


def test_what_a_call_changes_in_the_model_is_put_back():
    class Counter(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign_add(1.0)
            return x

    layer = Counter()
    inputs = keras.Input((X.shape[1],))
    model = keras.Model(inputs, layer(inputs))
    layer.count.assign(7.0)
    profile(model, batch_sizes=(1, 2), time_budget_s=0.3, call_paths=("compiled", "saved_model"))
    assert float(layer.count) == 7.0
