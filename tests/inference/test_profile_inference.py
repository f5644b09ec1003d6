"""`profile_inference` on small models."""

import contextlib
import io
import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from shared_worker import shared_worker
from small_models import mlp, rows

import kbatch
from kbatch.errors import InputError, TargetTooLow
from kbatch.inference.measure import measure_predict_memory
from kbatch.inference.result import InferenceProfile

X = rows(32)[0]


def profile(model=None, x=X, **changed):
    arguments = {"batch_sizes": (1, 8, 64), "time_budget_s": 3.0, "measure_memory": False}
    return kbatch.profile_inference(model or mlp(), x, **(arguments | changed))


@pytest.fixture(scope="module")
def paths_and_policies(tmp_path_factory):
    """A profile with a target, saved and loaded, and the printed progress."""
    model = mlp()
    before = model.get_weights()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = profile(
            model,
            call_paths=("compiled", "predict"),
            dtype_policies=("float32", "bfloat16"),
            latency_slo_ms=np.float32(10_000),  # Numbers of NumPy are accepted and saved.
            quantile=np.float64(0.95),
            time_budget_s=np.float32(16.0),
        )
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    path = tmp_path_factory.mktemp("profile") / "p.json"
    result.save(path)
    loaded = InferenceProfile.load(path)
    assert loaded == result
    return loaded, printed.getvalue()


def test_profile_inference_has_a_timing_for_each_path_policy_and_size(paths_and_policies):
    result, _ = paths_and_policies
    assert result.series == tuple(
        (path, policy) for policy in ("float32", "bfloat16") for path in ("compiled", "predict")
    )
    assert [t.batch_size for t in result.timings] == [1, 8, 64] * 4
    for timing in result.timings:
        if timing.measured:
            assert timing.first_call_s > 0
            assert len(timing.latencies_s) >= len(timing.times_s) >= 1
        else:
            assert timing.reason.code in ("warm_up_time_spent", "too_slow_to_time")
    assert all(timing.measured for timing in result.timings[:3])


@pytest.mark.slow
def test_profile_inference_measures_the_memory_of_each_policy_and_size(capsys):
    policies = ("float32", "bfloat16")
    with shared_worker():  # Instead of one process for each policy.
        limits = {"memory_limit_bytes": np.int64(2**28), "time_budget_s": 60.0}
        result = profile(dtype_policies=policies, measure_memory=True, **limits)
    assert {(m.dtype_policy, m.batch_size) for m in result.memory} == {
        (policy, size) for policy in policies for size in (1, 8, 64)
    }
    assert all(m.outcome == "fits" and m.peak_bytes > 0 for m in result.memory)
    assert result.memory_limit_bytes == 2**28
    printed = capsys.readouterr().out
    assert "measuring memory in a worker process" in printed.splitlines()[0]
    assert "memory of batch 8 under bfloat16: " in printed


@pytest.mark.slow
def test_measure_predict_memory_skips_sizes_and_policies_if_its_time_is_spent(monkeypatch):
    models, inputs = {"float32": mlp(), "bfloat16": mlp()}, X
    say = {"memory_limit_bytes": None, "say": lambda line: None}
    cases = ((math.inf, 60, "fits", "fits"), (math.inf, -1, "fits", "not_run"))
    for most_s, least_s, *first in (*cases, (0.1, 60, "not_run", "not_run")):
        monkeypatch.setattr("kbatch.inference.measure._LEAST_PROBING_S", least_s)
        limits = {"ends_s": time.perf_counter(), "latest_s": time.perf_counter() + most_s}
        memory = measure_predict_memory(models, inputs, (1, 8), **limits, **say)
        assert [m.outcome for m in memory.records] == [*first, "not_run", "not_run"]
        assert not any(m.guarded for m in memory.records)


def test_profile_inference_verifies_a_loose_target_by_fresh_calls(paths_and_policies):
    result, printed = paths_and_policies
    answer = result.batch_for(latency_ms=10_000)
    assert (answer.batch_size, answer.verified) == (64, True)
    assert not result.batch_for(latency_ms=9_000, quantile=0.5).verified
    (check,) = result.checks
    assert len(check.latencies_s) >= 59
    assert 0 < result.output_changes["bfloat16"] < 0.1
    for words in ("compiled under float32, size 1: ", "checked batch 64: "):
        assert words in printed


def test_profile_inference_default_sizes():
    result = kbatch.profile_inference(mlp(), measure_memory=False, time_budget_s=0.5)
    assert [t.batch_size for t in result.timings] == [2**k for k in range(13)]
    assert result.timings[0].measured
    assert [note.code for note in result.noted] == ["inputs_made"]


def test_profile_inference_builds_a_subclassed_model_by_a_call():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    result = profile(Own(), dtype_policies=("float32", "float16"), time_budget_s=0.3)
    assert result.series == (("compiled", "float32"),)
    assert "policy_not_measured" in [note.code for note in result.notes]


def test_profile_inference_continues_after_out_of_memory():
    class RunsOut(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(self.checked, [x], x.dtype), x.shape)

        def checked(self, x):
            if len(x) > 8:
                raise MemoryError("no memory for that")
            return x

    inputs = keras.Input((X.shape[1],))
    model, sizes = keras.Model(inputs, RunsOut()(inputs)), (8, 64)  # Two sizes always run.
    timings = profile(model, batch_sizes=sizes, time_budget_s=0.1).timings
    assert [t.outcome for t in timings] == ["measured", "out_of_memory"]


def of_four_rows():
    inputs = keras.Input(batch_shape=(4, X.shape[1]))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"batch_sizes": (4, 2)}, ValueError, "ascending"),
        ({"latency_slo_ms": -1}, ValueError, "positive number of milliseconds"),
        ({"quantile": "0.9"}, ValueError, "between 0 and 1"),
        ({"time_budget_s": "5"}, InputError, "time_budget_s"),
        ({"memory_limit_bytes": 0}, ValueError, "at least one MiB"),
        ({"call_paths": "onnx"}, InputError, "`call_paths` must be one or more"),
        ({"call_paths": ("predict",), "latency_slo_ms": 5}, InputError, "one batch.*`call_paths`"),
        ({"dtype_policies": "float8"}, ValueError, "dtype_polic"),
        ({"dtype_policies": ("float16", "float16")}, InputError, "dtype_policies"),
        ({"bulk_examples": 0}, ValueError, "bulk_examples"),
        ({"model": "model.keras"}, TypeError, "load the model first"),
        ({"model": of_four_rows()}, InputError, r"batches of any size.*batches of 4 only"),
        ({"x": X[:, 1:]}, InputError, r"an array for each input.*Received: x with rows"),
        (
            {"latency_slo_ms": 1e-3},
            TargetTooLow,
            "^The latency target .* ms, because batch size 1 ",
        ),
    ],
)
def test_profile_inference_refuses(changed, error, message):
    with pytest.raises(error, match=message):
        profile(**changed)


def test_profile_inference_restores_the_state_of_the_model():
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
