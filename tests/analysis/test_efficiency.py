import numpy as np
import pytest

from kbatch.analysis.goodput import (
    best_batch_size,
    best_measured_batch_size,
    goodput,
    statistical_efficiency,
)

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


def test_goodput_is_the_throughput_where_examples_count_fully():
    value = goodput(64, 0.5, noise_scale=100, base_batch_size=64)
    np.testing.assert_allclose(value, 128)


def test_times_to_a_target_go_as_the_inverse_of_goodput():
    def time_s(b):
        return (1 + 100 / b) * (0.01 + 1e-4 * b)

    def value(b, base):
        return goodput(b, 0.01 + 1e-4 * b, noise_scale=100, base_batch_size=base)

    for base in (1, 64):
        np.testing.assert_allclose(value(512, base) / value(16, base), time_s(16) / time_s(512))


@pytest.mark.parametrize(
    ("overhead_s", "per_example_s", "noise_scale"),
    [(0.01, 1e-4, 100.0), (0.002, 1e-5, 3000.0), (0.5, 1e-3, 4.0)],
)
def test_the_closed_form_is_the_largest_goodput(overhead_s, per_example_s, noise_scale):
    best = best_batch_size(
        overhead_s=overhead_s, per_example_s=per_example_s, noise_scale=noise_scale
    )
    sizes = list(range(1, 5000))
    times = [overhead_s + per_example_s * size for size in sizes]
    found = best_measured_batch_size(sizes, times, noise_scale=noise_scale)
    assert abs(found - best) <= 1


def test_without_overhead_or_noise_the_best_batch_is_one_example():
    assert best_batch_size(overhead_s=0, per_example_s=1e-4, noise_scale=1e3) == 1
    assert best_batch_size(overhead_s=0.01, per_example_s=1e-4, noise_scale=0) == 1


def test_a_step_in_the_measured_times_is_respected():
    # Memory pressure: beyond 128 each example takes five times as long.
    sizes = [32, 64, 128, 256, 512]
    times = [0.01 + 1e-5 * size * (5 if size > 128 else 1) for size in sizes]
    assert best_measured_batch_size(sizes, times, noise_scale=1000) == 128


def test_of_two_equals_the_smaller_is_best():
    assert best_measured_batch_size([2, 4], [1.0, 2.0], noise_scale=0.0) == 2
    assert best_measured_batch_size([4, 2], [1.0, 1.0], noise_scale=0.0) == 2


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overhead_s": -0.1}, r"overhead_s=-0\.1"),
        ({"per_example_s": 0.0}, r"per_example_s=0\.0"),
        ({"noise_scale": np.inf}, "noise_scale=inf"),
    ],
)
def test_a_closed_form_without_meaning_is_refused(change, message):
    arguments = {"overhead_s": 0.01, "per_example_s": 1e-4, "noise_scale": 100.0} | change
    with pytest.raises(ValueError, match=message):
        best_batch_size(**arguments)


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([1, 2], [0.1])])
def test_nothing_to_choose_from_is_refused(sizes, times):
    with pytest.raises(ValueError, match=f"{len(sizes)} and {len(times)} values"):
        best_measured_batch_size(sizes, times, noise_scale=1.0)
