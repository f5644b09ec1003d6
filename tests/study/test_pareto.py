import itertools

import numpy as np
import pytest

from kbatch.study.figures.pareto import pareto_front


def naive(first, second):
    pairs = list(zip(first, second, strict=True))
    beaten = {
        i
        for (i, a), (j, b) in itertools.permutations(enumerate(pairs), 2)
        if b[0] >= a[0] and b[1] >= a[1] and b != a
    }
    return {i for i in range(len(pairs)) if i not in beaten}


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_no_other_choice_beats(seed):
    # Small integers, so that many are equal in one quality or in both.
    first, second = np.random.default_rng(seed).integers(0, 6, (2, 12)).tolist()
    front = pareto_front(list(zip(first, second, strict=True)))
    assert set(front) == naive(first, second)
    assert [first[i] for i in front] == sorted(first[i] for i in front)


def test_along_the_front_one_quality_rises_and_the_other_falls():
    first, second = np.random.default_rng(1).normal(size=(2, 50)).tolist()
    front = pareto_front(list(zip(first, second, strict=True)))
    values = [second[i] for i in front]
    assert values == sorted(values, reverse=True)
    assert len(front) > 2


def test_one_choice_and_none():
    assert pareto_front([(1.0, 2.0)]) == (0,)
    assert pareto_front([]) == ()
