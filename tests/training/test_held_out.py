import numpy as np
import pytest
import tensorflow as tf

from kbatch.training.data.forms import FitData, with_held_out


def split(count=50, **changed):
    x = np.arange(count, dtype="float32")[:, None]
    return with_held_out(FitData(x, 10 * x[:, 0], **changed), seed=0)


def numbers(part):
    return np.asarray(part).ravel().tolist()


@pytest.mark.parametrize("count", [5, 50, 1797])
def test_every_row_is_in_one_part(count):
    data = split(count)
    held_x, held_y = data.validation_data
    kept, held = numbers(data.x), numbers(held_x)
    assert sorted(kept + held) == list(range(count))
    assert len(held) == count // 5
    np.testing.assert_array_equal(numbers(data.y), 10 * np.array(kept))
    np.testing.assert_array_equal(numbers(held_y), 10 * np.array(held))


def test_rows_are_drawn_not_cut_off():
    held = numbers(split().validation_data[0])
    assert held != list(range(40, 50))
    assert held == numbers(split().validation_data[0])
    other = with_held_out(FitData(np.arange(50.0)[:, None]), seed=1).validation_data
    assert held != numbers(other[0])


def test_at_most_1024_rows_are_held_out():
    data = split(20_000)
    assert (len(data.validation_data[0]), len(data.x)) == (1024, 18_976)


def test_weights_go_with_their_rows():
    x = np.arange(10.0)[:, None]
    weights = with_held_out(FitData(x, x[:, 0], 2 * x[:, 0]), seed=0)
    np.testing.assert_array_equal(numbers(weights.sample_weight), 2 * np.array(numbers(weights.x)))
    labels = (x[:, 0] > 4).astype(int)
    classes = with_held_out(FitData(x, labels, class_weight={0: 1.0, 1: 5.0}), seed=0)
    assert classes.class_weight is None
    expected = [5.0 if row > 4 else 1.0 for row in numbers(classes.x)]
    assert numbers(classes.sample_weight) == expected


def test_other_data_stay_as_they_are():
    x = np.zeros((10, 1))
    dataset = tf.data.Dataset.from_tensor_slices(x)
    for data in (
        FitData(dataset),
        FitData(lambda batch_size: dataset.batch(batch_size)),
        FitData(x, x, validation_data=(x, x)),
        FitData(x[:4], x[:4]),
    ):
        assert with_held_out(data, seed=0) == data
