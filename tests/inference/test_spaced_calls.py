import numpy as np
import pytest

from kbatch.inference.sweep import spaced_calls


def test_enough_calls_are_kept_in_order_and_not_many_more():
    for count in (1, 50, 99, 100, 101, 199, 200, 999, 2995, 100_000):
        kept = spaced_calls(range(count), least=100, seed=1)
        assert min(count, 100) <= len(kept) < 200 or count == len(kept)
        assert kept == sorted(set(kept))


@pytest.mark.parametrize("length", [128, 640, 997])
def test_each_place_of_a_block_is_kept_equally_often(length):
    places = [place for _ in range(20) for place in range(length)]
    shares = [
        np.mean(np.array(spaced_calls(places, least=1280, seed=seed)) == 0) for seed in range(200)
    ]
    assert np.mean(shares) == pytest.approx(1 / length, rel=0.15)


def test_slow_blocks_with_few_calls_count_by_their_calls():
    durations_s = ([0.001] * 500 + [0.004] * 50) * 10
    kept = spaced_calls(durations_s, least=640, seed=0)
    assert np.mean(np.array(kept) == 0.004) == pytest.approx(1 / 11, abs=0.03)


def test_one_seed_gives_one_sample():
    values = list(range(1000))
    assert spaced_calls(values, least=10, seed=3) == spaced_calls(values, least=10, seed=3)
    assert spaced_calls(values, least=10, seed=3) != spaced_calls(values, least=10, seed=4)
