"""Profiles of training of small models on this CPU."""

import keras
import memory_models
import pytest
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.errors import InputError
from kbatch.memory.result import peaks_under

DATA = models.rows(94)
QUICK = {"measure_memory": False, "time_budget_s": 1.0}


def sizes_of(profile):
    return [u.batch_size for u in profile.updates if u.steps_per_execution == 1]


def test_profile_training_with_default_sizes(capsys):
    profile = kbatch.profile_training(
        models.Locked(models.linear), *models.rows(20), time_budget_s=2.0
    )
    output = capsys.readouterr().out
    assert "measures memory" in output
    assert "after warm-up" in output
    assert sizes_of(profile) == [1, 2, 4, 8, 16]
    measured = [update for update in profile.updates if update.measured]
    alone = {u.batch_size for u in measured if u.steps_per_execution == 1}
    several = [update for update in measured if update.steps_per_execution > 1]
    assert several
    assert {update.batch_size for update in several} <= alone
    # An execution is not longer than an epoch of 20 rows.
    assert all(u.steps_per_execution <= -(-20 // u.batch_size) for u in several)
    assert (profile.dtype_policy, profile.jit_compile) == ("float32", False)
    assert profile.environment.versions["keras"] == keras.__version__
    # The peaks of such a small model depend on the threads.
    peaks = peaks_under(profile.dtype_policy, profile.memory).values()
    assert len(peaks) >= 2
    assert 0 < min(peaks) <= max(peaks) < profile.memory_limit_bytes


def test_profile_training_skips_sizes_beyond_the_data():
    def batches(size):
        return tf.data.Dataset.from_tensor_slices(DATA).batch(size)

    profile = kbatch.profile_training(models.linear, batches, batch_sizes=(16, 128, 256), **QUICK)
    outcomes = {u.batch_size: u.reason.code if u.reason else u.outcome for u in profile.updates}
    assert outcomes[16] == "measured"
    assert outcomes[128] == outcomes[256] == "data_gave_fewer"


@pytest.mark.slow
def test_profile_training_size_that_does_not_fit():
    limits = {"memory_limit_bytes": 64 * memory_models.MB, "time_budget_s": 30.0}
    sizes, build = (4, 16, 4000, 8000), memory_models.wide_net
    profile = kbatch.profile_training(build, *models.rows(64), batch_sizes=sizes, **limits)
    outcomes = {u.batch_size: u.reason.code if u.reason else u.outcome for u in profile.updates}
    assert [outcomes[size] for size in (4, 16)] == ["measured", "measured"]
    assert outcomes[4000] == "memory_expected"
    assert profile.memory_limit_bytes == 64 * memory_models.MB
    peaks = peaks_under(profile.dtype_policy, profile.memory)
    assert list(peaks) == [4, 16]
    assert peaks[4] < peaks[16] < 64 * memory_models.MB


BAD = {
    "descending": ({"batch_sizes": (8, 4)}, ValueError, "ascending"),
    "no time": ({"time_budget_s": 0}, InputError, "time_budget_s"),
    "endless": ({"time_budget_s": float("inf")}, InputError, "time_budget_s"),
    "no memory": ({"memory_limit_bytes": -1}, ValueError, "memory_limit_bytes"),
    "targets twice": ({"x": tf.data.Dataset.range(3)}, InputError, "contains its targets"),
    "no loss": ({"build": keras.Sequential([keras.layers.Dense(3)])}, ValueError, "compile"),
}


@pytest.mark.parametrize("name", BAD)
def test_profile_training_invalid_arguments(name):
    changed, kind, words = BAD[name]
    arguments = {"build": pytest.fail, "x": DATA[0], "measure_memory": False} | changed
    with pytest.raises(kind, match=rf"{words}.*Received: "):
        kbatch.profile_training(arguments.pop("build"), arguments.pop("x"), DATA[1], **arguments)
