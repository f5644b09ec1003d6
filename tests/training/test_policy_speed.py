import keras

from kbatch.training.dtype_policy import TIMED_POLICIES as POLICIES
from kbatch.training.dtype_policy import measure_policy_speeds


def test_every_policy_is_timed_and_the_global_one_is_kept():
    before = keras.config.dtype_policy()
    ratios = measure_policy_speeds(width=16)
    assert list(ratios) == list(POLICIES)
    assert ratios["float32"] == 1.0
    assert all(ratio > 0 for ratio in ratios.values())
    assert keras.config.dtype_policy() == before
