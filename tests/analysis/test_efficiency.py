import numpy as np
import pytest

from kbatch.analysis.goodput import goodput, statistical_efficiency

SIZES = [1, 7, 64, 1000]


@pytest.mark.parametrize("noise_scale", [0.0, 0.5, 100.0, 1e6])
def test_efficiency_is_one_at_the_base_and_falls(noise_scale):
    values = [statistical_efficiency(b, noise_scale=noise_scale, base_batch_size=64) for b in SIZES]
    assert values == sorted(values, reverse=True)
    assert values[SIZES.index(64)] == 1


@pytest.mark.parametrize("size", SIZES)
def test_efficiency_of_pure_noise_is_one_and_of_none_goes_as_the_inverse(size):
    noisy = statistical_efficiency(size, noise_scale=1e12, base_batch_size=64)
    np.testing.assert_allclose(noisy, 1, rtol=1e-8)
    clean = statistical_efficiency(size, noise_scale=0, base_batch_size=64)
    np.testing.assert_allclose(clean, 64 / size)


def test_efficiency_by_two_bases_is_a_product():
    def relative(b, base):
        return statistical_efficiency(b, noise_scale=100, base_batch_size=base)

    np.testing.assert_allclose(relative(512, 8), relative(512, 64) * relative(64, 8))


def test_it_is_the_progress_of_an_example_by_the_steps_to_a_target():
    # S(B) = S_min (1 + B_noise / B): an example's progress is one over the examples needed.
    def examples(b):
        return b * (1 + 100 / b)

    value = statistical_efficiency(512, noise_scale=100, base_batch_size=64)
    np.testing.assert_allclose(value, examples(64) / examples(512))


def test_times_to_a_target_go_as_the_inverse_of_goodput():
    def time_s(b):
        return (1 + 100 / b) * (0.01 + 1e-4 * b)

    def value(b, base):
        return goodput(b, 0.01 + 1e-4 * b, noise_scale=100, base_batch_size=base)

    for base in (1, 64):
        np.testing.assert_allclose(value(512, base) / value(16, base), time_s(16) / time_s(512))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"base_batch_size": 0}, "base_batch_size=0"),
        ({"step_time_s": 0.0}, r"step_time_s=0\.0"),
        ({"noise_scale": -1.0}, r"noise_scale=-1\.0"),
        ({"noise_scale": np.nan}, "noise_scale=nan"),
    ],
)
def test_numbers_out_of_range_are_named(change, message):
    arguments = {"batch_size": 8, "step_time_s": 1.0, "noise_scale": 9.0, "base_batch_size": 8}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        goodput(arguments.pop("batch_size"), arguments.pop("step_time_s"), **arguments)
