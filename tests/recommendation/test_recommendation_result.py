import dataclasses
import itertools

import numpy as np
import pytest
from input_profile_factory import make_long_run, make_profile
from recommendation_factory import (
    NOTHING,
    SIZES,
    make_memory,
    make_pilot,
    make_recommendation,
    make_timings,
)

from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.plotting.draw import names_above
from kbatch.recommendation.figure import curves_of, plot_limits
from kbatch.recommendation.result import LIMIT_NAMES, times_to_goal, useful_stretches
from kbatch.throughput.result import TimedUpdate

UNRESOLVED = make_pilot(scatter=30.0)


def test_recommendation_follows_the_device_and_the_noise():
    for n_half, scale in itertools.product([10.0, 100.0, 800.0], [30.0, 200.0, 3000.0]):
        result = make_recommendation(n_half=n_half, noise_scale=scale)
        noise, rate = result.noise_scale.value, result.input_rates[1]
        times = times_to_goal(result.times_s, noise_scale=noise, rate=rate)
        assert times[result.batch_size] <= 1.05 * min(times.values())
        assert result.micro_batch_size == result.batch_size
        assert {result.batch_size, 32} <= set(result.batch_sizes) <= set(SIZES)
        assert result.binding == ("saturation" if 9 * n_half < scale else "noise",)


def test_memory_binds_if_it_limits_the_sizes():
    fitting, cut = [size for size in SIZES if size <= 32], [size for size in SIZES if size > 32]
    device = {"n_half": 300, "noise_scale": 2000.0, "updates": make_timings(300, sizes=fitting)}
    few = make_recommendation(**device, memory=make_memory(40), cut=tuple(cut))
    assert few.binding == ("memory",)
    assert (few.micro_batch_size, list(few.times_s)) == (32, list(SIZES))
    assert few.times_s[256] == pytest.approx(8 * few.times_s[32])
    # Here the number of examples limits the sizes.
    assert "memory" not in make_recommendation(**device).binding


def test_slow_pipeline_binds_and_reduces_the_batch_size():
    slow = make_recommendation(input_rate=15_000.0)
    assert slow.binding == ("input",)
    assert slow.batch_size < make_recommendation().batch_size
    assert "input_binds" in [note.code for note in slow.notes]


def test_input_rates_with_a_long_reading():
    long_run = make_long_run(8_000, 20_000)
    bursts = make_profile(batch_size=256, pipeline=1e6, step=50_000, long_run=long_run)
    result = make_recommendation(pipeline=bursts)
    assert result.input_rates[1] == pytest.approx(20_000)
    assert result.binding == ("input",)
    assert make_recommendation(pipeline=None).input_rates[1] == float("inf")


def test_learning_rate_follows_its_rule():
    root, linear = make_recommendation(), make_recommendation(learning_rate_rule="linear")
    kappa = root.batch_size / 32
    assert kappa > 1
    assert root.learning_rate == pytest.approx(0.001 * kappa**0.5)
    assert linear.learning_rate == pytest.approx(0.001 * kappa)
    assert make_recommendation(base_learning_rate=None).learning_rate is None
    # Without a rule it does not change.
    assert make_recommendation(learning_rate_rule=None).learning_rate == pytest.approx(0.001)


@pytest.mark.parametrize("pilot", [UNRESOLVED, None])
def test_batch_size_without_a_noise_scale_is_the_base_size(pilot):
    result = make_recommendation(pilot=pilot)
    assert (result.batch_size, result.learning_rate) == (32, 0.001)
    assert result.batch_sizes[0] == SIZES[0]
    assert result.binding == ("saturation", "noise")
    # If the base size was not timed, the nearest size is taken.
    assert make_recommendation(pilot=pilot, updates=make_timings(sizes=(64, 128))).batch_size == 64


def test_recommendation_without_timings():
    empty = make_recommendation(**NOTHING)
    assert (empty.batch_size, empty.micro_batch_size, empty.learning_rate) == (None, None, None)
    assert (empty.batch_sizes, empty.binding, empty.saturation) == ((), (), None)
    one = make_recommendation(updates=make_timings(sizes=(32,)))
    assert (one.batch_size, one.batch_sizes, one.saturation) == (32, (32,), None)


def test_batch_sizes_include_a_size_that_was_not_timed():
    updates, left_out = list(make_timings()), make_recommendation().batch_size
    updates[SIZES.index(left_out)] = TimedUpdate(batch_size=left_out, outcome="not_run")
    # Size 8 was timed with one step per execution.
    updates.append(TimedUpdate(batch_size=8, steps_per_execution=9, outcome="out_of_memory"))
    result = make_recommendation(updates=tuple(updates))
    assert left_out in result.batch_sizes
    assert ["not timed" in text for text in result.settings.values()].count(True) == 1


def test_slow_rounds_do_not_change_the_recommendation():
    def slowed(update):
        is_slowed = update.batch_size in (16, 64, 256)  # In most rounds, so the median is slow.
        factors = [1, 1, 1, 1, 2.5, 2.6, 2.7, 2.8, 2.9, 3] if is_slowed else [1] * 10
        times_s = tuple(f * s for f, s in zip(factors, update.times_s, strict=True))
        return dataclasses.replace(update, times_s=times_s)

    quiet = make_recommendation()
    noisy = make_recommendation(updates=tuple(map(slowed, make_timings())))
    assert noisy.times_s == pytest.approx(quiet.times_s, rel=0.02)
    assert noisy.batch_size == quiet.batch_size
    assert noisy.saturation.value == pytest.approx(quiet.saturation.value, rel=0.1)


def test_saturation_needs_more_than_one_round():
    # Measured in a call with a budget of 60 s, after a pilot of 73 s.
    times = ((8, 0.000697), (16, 0.000859), (32, 0.000725))
    once = make_recommendation(updates=[TimedUpdate(batch_size=b, times_s=(s,)) for b, s in times])
    assert once.saturation is None
    assert once.binding == ("saturation", "noise")
    twice = [TimedUpdate(batch_size=b, times_s=(s, 1.01 * s)) for b, s in times]
    assert make_recommendation(updates=twice).saturation.value == 29


def test_noise_scale_of_the_later_useful_stretches():
    pilot = make_pilot()
    useful = useful_stretches(pilot.losses)
    assert 6 < useful < len(pilot.losses)

    def of_first(pilot, count):
        moments = pilot.gradient_variances[:count], pilot.gradient_squared_norms[:count]
        return noise_scale_of_runs([(*moments, 1.0)]).value

    def noise_scale(pilot):
        return make_recommendation(pilot=pilot).noise_scale.value

    assert noise_scale(pilot) == pytest.approx(of_first(pilot, useful))
    assert noise_scale(pilot) == pytest.approx(200, rel=0.1)
    # At least six stretches.
    fast = make_pilot(losses=(2.0, *[0.1] * 39))
    assert noise_scale(fast) == pytest.approx(of_first(fast, 6))
    assert noise_scale(make_pilot(gradient_variances=(None,) * 40)) is None


def test_answer_and_table():
    result = make_recommendation()
    size, (first, *_, last) = result.batch_size, result.batch_sizes
    assert result.answer.startswith(f"Start with batch size {size} and learning rate ")
    assert result.answer.endswith(": gradient noise limits the size.")
    assert result.notes[-1].code == "search_the_sizes"
    assert result.notes[-1].values["sizes"].startswith(f"{first}, ")
    assert result.notes[-1].values["sizes"].endswith(f", {last}")
    table = result.table()
    assert list(table["limit"]) == [LIMIT_NAMES[limit] for limit in result.limits]
    assert table.attrs["answer"] == [2]
    assert table["begins at (examples)"][2] == pytest.approx(result.noise_scale.value)
    assert table["begins at (examples), low"][2] == result.noise_scale.low
    assert table["begins at (examples)"][0] == 1437


def test_batch_size_with_a_lower_bound_of_the_noise_scale():
    few = dataclasses.replace(make_pilot(), losses=(2.0, *[0.1] * 39))
    rows = {"gradient_variances": (200.0,) * 40, "gradient_squared_norms": (1.0, 1.0, -0.9) * 13}
    result = make_recommendation(pilot=dataclasses.replace(few, **rows))
    assert result.noise_scale.value is None
    assert result.noise_scale.low > 32
    assert result.batch_size > 32
    assert "at most twice" in result.table().set_index("limit")["outcome"]["gradient noise"]


def test_curves_progress_per_second_is_throughput_times_per_example():
    curves = curves_of(make_recommendation())
    assert all(tuple(curve) == tuple(SIZES) for curve in curves.values())
    values = [[estimate.value for estimate in curve.values()] for curve in curves.values()]
    throughput, per_example, progress = values
    product = np.array(throughput) * per_example
    np.testing.assert_allclose(progress, product / product.max())
    assert max(throughput) == per_example[0] == 1
    for estimate in curves["progress per example"].values():
        assert estimate.low <= estimate.value <= estimate.high
    assert list(curves_of(make_recommendation(pilot=UNRESOLVED))) == ["samples/s"]
    assert curves_of(make_recommendation(**NOTHING)) == {}


def test_times_are_of_the_fastest_steps_per_execution():
    single = make_timings(100)
    several = [
        dataclasses.replace(t, steps_per_execution=8, times_s=tuple(f * s for s in t.times_s))
        for f, t in zip((0.5, 0.5, 0.5, 3), make_timings(20, sizes=SIZES[:4]), strict=True)
    ]
    result = make_recommendation(updates=(*single, *several))
    expected = make_recommendation(updates=(*several[:3], *single[3:]))
    assert result.times_s == expected.times_s
    assert result.times_s[SIZES[0]] < make_recommendation().times_s[SIZES[0]] / 2
    assert result.saturation == expected.saturation


def test_plot_limits():
    result = make_recommendation()
    panel = plot_limits(result)
    lines = [line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2]
    assert result.batch_size in lines
    ends = [patch.get_bbox().intervalx.tolist() for patch in panel.patches]
    assert [result.batch_sizes[0], result.batch_sizes[-1]] in ends
    texts = {text.get_text() for text in panel.texts}
    assert {"gradient noise: 190", "hardware saturation: 900", "memory: 1,400"} <= texts
    names_above(panel, [(9e9, "far")], panel.get_xlim())
    assert panel.texts[-1].get_text() == "far \N{RIGHTWARDS ARROW}"
    # From 100 examples on, the device is faster than the data.
    assert make_recommendation(input_rate=50_000.0).limits["input"][0].value == 128
    assert all(begins for begins, _ in result.limits.values())
    assert not any(begins for begins, _ in make_recommendation(**NOTHING).limits.values())
