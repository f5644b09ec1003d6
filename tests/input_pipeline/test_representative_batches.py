import itertools

import numpy as np
import pytest
import tensorflow as tf

from kbatch.input_pipeline.blocks import RepresentativeBatches


def chosen(shapes, *, whole=True):
    held = RepresentativeBatches()
    for shape in shapes:
        held.add((np.zeros(shape), np.zeros((shape[0], 1))))
    return [batch[0].shape for batch in held.chosen(whole=whole)]


def mean_elements(shapes):
    return np.mean([np.prod(shape) for shape in shapes])


LENGTHS = ((8, 24), (8, 16, 24), (24, 8, 16), (5, 10, 20, 40))


def test_lengths_that_alternate_are_all_there_in_their_proportion():
    for lengths, count in itertools.product(LENGTHS, (7, 16, 31, 100, 240, 333)):
        shapes = [(4, n) for n in itertools.islice(itertools.cycle(lengths), count)]
        found = chosen(shapes)
        assert {n for _, n in found} == set(lengths)
        assert mean_elements(found) == pytest.approx(mean_elements(shapes), rel=0.12)


def test_shapes_of_one_size_are_told_apart():
    assert set(chosen([(8, 64), (64, 8), (32, 16), (16, 32)] * 25)) == {
        (8, 64),
        (64, 8),
        (32, 16),
        (16, 32),
    }


def test_many_shapes_are_represented_by_those_in_between():
    order = np.random.default_rng(0).permutation(np.arange(1, 501))
    found = chosen([(4, int(n)) for n in order])
    assert len(set(found)) == 8
    assert mean_elements(found) == pytest.approx(4 * 250.5, rel=0.12)


def test_the_middle_size_comes_first():
    assert chosen([(8, 2), (8, 2), (4, 2)]) == [(8, 2), (8, 2), (4, 2)]
    assert chosen([(n, 2) for n in (8, 16, 24) * 10])[0] == (16, 2)


def test_a_ragged_end_of_many_batches_does_not_weigh_as_much_as_they_do():
    assert chosen([(8, 2)] * 15 + [(1, 2)]) == [(8, 2)] * 4


def test_a_rare_shape_that_was_not_the_end_stays_among_the_sizes():
    assert (1, 2) not in chosen([(8, 2)] * 30 + [(1, 2)] + [(8, 2)] * 30)
    assert chosen([(8, 2)] * 4 + [(1, 2)], whole=False).count((1, 2)) == 1


def test_ragged_batches_differ_in_what_they_hold():
    held = RepresentativeBatches()
    for length in [1] * 10 + [3] * 10 + [5] * 10:
        held.add(tf.RaggedTensor.from_row_lengths(tf.ones(4 * length), [length] * 4))
    assert {len(batch.flat_values) for batch in held.chosen(whole=False)} == {4, 12, 20}
