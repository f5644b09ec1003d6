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
from kbatch.recommendation.figure import curves_of, plot_limits
from kbatch.recommendation.result import LIMIT_NAMES, times_to_goal, useful_stretches
from kbatch.throughput.result import TimedUpdate

UNRESOLVED = make_pilot(scatter=30.0)


def test_the_size_and_the_limit_follow_the_device_and_the_noise():
    for n_half, scale in itertools.product([10.0, 100.0, 800.0], [30.0, 200.0, 3000.0]):
        found = make_recommendation(n_half=n_half, noise_scale=scale)
        known = {"noise_scale": found.noise_scale.value, "rate": found.input_rates[1]}
        times = times_to_goal(found.times_s, **known)
        assert times[found.batch_size] <= 1.05 * min(times.values())
        assert found.micro_batch_size == found.batch_size
        assert {found.batch_size, 32} <= set(found.batch_sizes) <= set(SIZES)
        first = "saturation" if 9 * n_half < scale else "noise"
        assert found.binding == (first,)


def test_memory_binds_where_it_ends_the_sizes():
    fitting, cut = [size for size in SIZES if size <= 32], [size for size in SIZES if size > 32]
    device = {"n_half": 300, "noise_scale": 2000.0, "updates": make_timings(300, sizes=fitting)}
    few = make_recommendation(**device, memory=make_memory(40), cut=tuple(cut))
    assert few.binding == ("memory",)
    assert (few.micro_batch_size, list(few.times_s)) == (32, list(SIZES))
    assert few.times_s[256] == pytest.approx(8 * few.times_s[32])
    # The data and not memory end the sizes.
    assert "memory" not in make_recommendation(**device).binding


def test_a_slow_pipeline_binds_and_takes_the_batch_down():
    slow = make_recommendation(input_rate=15_000.0)
    assert slow.binding == ("input",)
    assert slow.batch_size < make_recommendation().batch_size
    assert "input_binds" in [note.code for note in slow.notes]


def test_a_long_reading_of_the_pipeline_bounds_its_rounds():
    bursts = make_profile(
        batch_size=256, pipeline=1e6, step=50_000, long_run=make_long_run(8_000, 20_000)
    )
    found = make_recommendation(pipeline=bursts)
    assert found.input_rates[1] == pytest.approx(20_000)
    assert found.binding == ("input",)
    assert make_recommendation(pipeline=None).input_rates[1] == float("inf")


def test_the_learning_rate_follows_by_its_rule():
    root, linear = make_recommendation(), make_recommendation(learning_rate_rule="linear")
    kappa = root.batch_size / 32
    assert kappa > 1
    assert root.learning_rate == pytest.approx(0.001 * kappa**0.5)
    assert linear.learning_rate == pytest.approx(0.001 * kappa)
    assert make_recommendation(base_learning_rate=None).learning_rate is None
    # Where it follows by no rule it stays, as in a search.
    assert make_recommendation(learning_rate_rule=None).learning_rate == pytest.approx(0.001)


@pytest.mark.parametrize("pilot", [UNRESOLVED, None])
def test_without_a_noise_scale_the_size_that_the_learning_rate_suits_is_the_start(pilot):
    found = make_recommendation(pilot=pilot)
    assert (found.batch_size, found.learning_rate) == (32, 0.001)
    assert found.batch_sizes[0] == SIZES[0]
    assert found.binding == ("saturation", "noise")
    # Where it was not timed, the nearest size.
    assert make_recommendation(pilot=pilot, updates=make_timings(sizes=(64, 128))).batch_size == 64


def test_without_timings_no_size_is_named():
    empty = make_recommendation(**NOTHING)
    assert (empty.batch_size, empty.micro_batch_size, empty.learning_rate) == (None, None, None)
    assert (empty.batch_sizes, empty.binding, empty.saturation) == ((), (), None)
    one = make_recommendation(updates=make_timings(sizes=(32,)))
    assert (one.batch_size, one.batch_sizes, one.saturation) == (32, (32,), None)


def test_a_size_between_others_that_the_time_left_out_is_searched():
    updates, left_out = list(make_timings()), make_recommendation().batch_size
    updates[SIZES.index(left_out)] = TimedUpdate(batch_size=left_out, outcome="not_run")
    # Of size 8 one of two ways.
    updates.append(TimedUpdate(batch_size=8, steps_per_execution=9, outcome="out_of_memory"))
    found = make_recommendation(updates=tuple(updates))
    assert left_out in found.batch_sizes
    assert ["not timed" in text for text in found.settings.values()].count(True) == 1


def test_rounds_beside_a_neighbour_move_neither_times_nor_start():
    def slowed(update):
        many = update.batch_size in (16, 64, 256)  # Of these the median is the neighbour's.
        factors = [1, 1, 1, 1, 2.5, 2.6, 2.7, 2.8, 2.9, 3] if many else [1] * 10
        times_s = tuple(f * s for f, s in zip(factors, update.times_s, strict=True))
        return dataclasses.replace(update, times_s=times_s)

    quiet = make_recommendation()
    noisy = make_recommendation(updates=tuple(map(slowed, make_timings())))
    assert noisy.times_s == pytest.approx(quiet.times_s, rel=0.02)
    assert noisy.batch_size == quiet.batch_size
    assert noisy.saturation.value == pytest.approx(quiet.saturation.value, rel=0.1)


def test_single_times_of_each_size_name_no_saturation():
    # What a call of 60 s timed after a pilot of 73 s.
    times = ((8, 0.000697), (16, 0.000859), (32, 0.000725))
    once = make_recommendation(updates=[TimedUpdate(batch_size=b, times_s=(s,)) for b, s in times])
    assert once.saturation is None
    assert once.binding == ("saturation", "noise")
    twice = [TimedUpdate(batch_size=b, times_s=(s, 1.01 * s)) for b, s in times]
    assert make_recommendation(updates=twice).saturation.value == 29


def test_the_noise_scale_is_that_of_the_late_half_of_the_useful_stretches():
    pilot = make_pilot()
    useful = useful_stretches(pilot.losses)
    assert 6 < useful < len(pilot.losses)

    def first(found, count):
        moments = found.gradient_variances[:count], found.gradient_squared_norms[:count]
        return noise_scale_of_runs([(*moments, 1.0)])

    def found(pilot):
        return make_recommendation(pilot=pilot).noise_scale.value

    assert found(pilot) == pytest.approx(first(pilot, useful).value)
    assert found(pilot) == pytest.approx(200, rel=0.1)
    # Six stretches at least.
    fast = make_pilot(losses=(2.0, *[0.1] * 39))
    assert found(fast) == pytest.approx(first(fast, 6).value)
    assert found(make_pilot(gradient_variances=(None,) * 40)) is None


def test_the_answer_has_the_start_and_what_binds_and_the_table_the_limits():
    found = make_recommendation()
    size, (first, *_, last) = found.batch_size, found.batch_sizes
    assert found.answer.startswith(f"Start with batch size {size} and learning rate ")
    assert found.answer.endswith(": gradient noise binds.")
    assert found.notes[-1].code == "search_the_sizes"
    assert found.notes[-1].values["sizes"].startswith(f"{first}, ")
    assert found.notes[-1].values["sizes"].endswith(f", {last}")
    table = found.table()
    assert list(table["limit"]) == [LIMIT_NAMES[limit] for limit in found.limits]
    assert table.attrs["answer"] == [2]
    assert table["begins at (examples)"][2] == pytest.approx(found.noise_scale.value)
    assert table["begins at (examples), low"][2] == found.noise_scale.low
    assert table["begins at (examples)"][0] == 1437


def test_a_noise_scale_of_which_only_the_least_is_known_is_a_start():
    few = dataclasses.replace(make_pilot(), losses=(2.0, *[0.1] * 39))
    rows = {"gradient_variances": (200.0,) * 40, "gradient_squared_norms": (1.0, 1.0, -0.9) * 13}
    found = make_recommendation(pilot=dataclasses.replace(few, **rows))
    noise = found.noise_scale
    assert noise.value is None
    assert noise.low > 32
    assert found.batch_size > 32
    assert "wastes at most half" in found.table().set_index("limit")["outcome"]["gradient noise"]


def test_progress_is_throughput_times_worth():
    found = make_recommendation()
    throughput, worth, progress = (
        [one.value for one in curve.values()] for curve in curves_of(found).values()
    )
    assert all(tuple(curve) == tuple(SIZES) for curve in curves_of(found).values())
    product = np.array(throughput) * worth
    np.testing.assert_allclose(progress, product / product.max())
    assert max(throughput) == worth[0] == 1
    for one in curves_of(found)["worth of an example"].values():
        assert one.low <= one.value <= one.high
    # Without a noise scale throughput is drawn alone.
    assert [len(c) for c in curves_of(make_recommendation(pilot=UNRESOLVED)).values()] == [
        len(SIZES)
    ]
    assert curves_of(make_recommendation(**NOTHING)) == {}


def test_of_each_size_the_fastest_number_of_steps_an_execution_counts():
    """As a search trains: much of what large batches gain by single steps is what these cost."""
    alone = make_timings(100)
    together = [
        dataclasses.replace(one, steps_per_execution=8, times_s=tuple(f * s for s in one.times_s))
        for f, one in zip((0.5, 0.5, 0.5, 3), make_timings(20, sizes=SIZES[:4]), strict=True)
    ]
    found = make_recommendation(updates=(*alone, *together))
    expected = make_recommendation(updates=(*together[:3], *alone[3:]))
    assert found.times_s == expected.times_s
    assert found.times_s[SIZES[0]] < make_recommendation().times_s[SIZES[0]] / 2
    assert found.saturation == expected.saturation


def test_the_drawing_has_the_limits_the_start_and_the_range():
    found = make_recommendation()
    panel = plot_limits(found)
    lines = [line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2]
    assert found.batch_size in lines
    ends = [patch.get_bbox().intervalx.tolist() for patch in panel.patches]
    assert [found.batch_sizes[0], found.batch_sizes[-1]] in ends
    named = {text.get_text() for text in panel.texts}
    assert {"gradient noise: 190", "hardware saturation: 900", "memory: 1,400"} <= named
    # The device makes as much from 100 examples on.
    assert make_recommendation(input_rate=50_000.0).limits["input"][0].value == 128
    assert all(begins for begins, _ in found.limits.values())
    assert not any(begins for begins, _ in make_recommendation(**NOTHING).limits.values())
