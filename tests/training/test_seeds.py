import random

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.training.state import kept_seeds, seed_of, seeded


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_gives_the_same_weights(seed):
    def weights():
        with seeded(seed):
            return models.mlp().get_weights()[0]

    np.testing.assert_array_equal(weights(), weights())


def test_derived_seeds_differ_by_every_part_and_repeat():
    seeds = [seed_of(seed, *parts) for seed in (0, 1) for parts in ((0, 0), (0, 1), (1, 0))]
    assert len(set(seeds)) == 6
    assert seed_of(0, 1, 0) == seeds[2]
    assert seed_of(None, 1) is None


@pytest.mark.parametrize("seed", [None, 5])
def test_all_random_numbers_go_on_as_if_nothing_was_drawn(seed):
    def drawn():
        return (
            random.random(),
            np.random.random(),
            float(keras.random.uniform(())),
            float(tf.random.uniform(())) if seed is not None else 0.0,
        )

    if seed is not None:
        keras.utils.set_random_seed(seed)
        drawn()
    with kept_seeds():
        first = drawn()
        keras.utils.set_random_seed(9)
        drawn()
    assert drawn() == first
