import dataclasses

import numpy as np
import pytest
from inference_factory import HALF_PEAK, make_failed, make_memory, make_profile, make_timing, time_s

from kbatch.inference.profile import TargetTooLow, round_noise
from kbatch.inference.record import TargetCheck, TimingRecord


def check(batch_size, latencies_s, *, best, latency_ms=5.0, quantile=0.95):
    return TargetCheck(
        "compiled", "float32", batch_size, latency_ms, quantile, tuple(latencies_s), best
    )


def test_knee_and_efficient_follow_from_the_line():
    profile = make_profile()
    assert profile.latency.follows_line
    assert profile.knee.batch_size == pytest.approx(HALF_PEAK, abs=1)
    assert profile.efficient.batch_size == pytest.approx(9 * HALF_PEAK, rel=0.1)
    assert profile.fastest.batch_size == 64
    for answer in (profile.knee, profile.efficient):
        assert answer.interval.low <= answer.batch_size <= answer.interval.high + 1
        assert not answer.verified


@pytest.mark.parametrize("target_ms", [1.5, 2.0, 3.0, 5.0, 7.0])
@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_the_batch_for_a_target_is_the_largest_whose_latency_keeps_to_it(target_ms, quantile):
    answer = make_profile().batch_for(latency_ms=target_ms, quantile=quantile)
    ideal = target_ms * 10 / 1.016 ** (quantile > 0.5) - HALF_PEAK
    assert abs(answer.batch_size - ideal) <= 1 + 0.05 * ideal
    assert answer.interval.low <= answer.batch_size + 1
    assert answer.interval.high >= answer.batch_size
    assert not answer.verified
    assert "fit of the" in answer.reason


def test_a_looser_target_never_has_a_smaller_batch():
    profile = make_profile()
    sizes = [profile.batch_for(latency_ms=t).batch_size for t in np.linspace(1.2, 9, 16)]
    assert sizes == sorted(sizes)


def test_a_target_below_one_example_says_what_can_be_reached():
    with pytest.raises(TargetTooLow, match=r"1\.1\d* ms at the 0\.95 quantile") as caught:
        make_profile().batch_for(latency_ms=0.5)
    assert caught.value.reachable_ms == pytest.approx(1000 * time_s(1), rel=0.1)


@pytest.mark.parametrize("scale", [0.85, 1.0, 1.15])
def test_what_is_said_to_be_reachable_is_above_a_target_that_is_too_low(scale):
    """The line and the times of one example may differ."""
    others = (make_timing(size, noise=0.2) for size in (2, 4, 8, 16, 32, 64))
    profile = make_profile(make_timing(1, scale=scale, noise=0.2), *others)
    for target_ms in np.linspace(0.8, 2.0, 13):
        try:
            assert profile.batch_for(latency_ms=target_ms).batch_size >= 1
        except TargetTooLow as error:
            assert error.reachable_ms > target_ms
            reachable_ms = error.reachable_ms
    assert profile.batch_for(latency_ms=1.01 * reachable_ms).batch_size >= 1


def test_sizes_below_the_smallest_measured_one_are_no_answer():
    profile = make_profile(*(make_timing(size) for size in (8, 16, 32)))
    with pytest.raises(TargetTooLow, match="at least what batch size 8 takes"):
        profile.batch_for(latency_ms=1.4)


def test_a_quantile_is_that_of_the_slow_calls():
    def with_slow_calls(size):
        calls = [time_s(size)] * 9 + [2 * time_s(size)]
        return make_timing(size, latencies_s=tuple(calls * 20))

    profile = make_profile(*map(with_slow_calls, (1, 4, 16, 64)))
    assert profile.batch_for(latency_ms=6, quantile=0.5).batch_size == pytest.approx(50, abs=1)
    assert profile.batch_for(latency_ms=6, quantile=0.95).batch_size == pytest.approx(20, abs=1)


def test_a_quantile_rests_on_the_sizes_with_enough_calls():
    few = make_timing(64, calls=20)
    slow = dataclasses.replace(few, latencies_s=tuple(100.0 for _ in few.latencies_s))
    profile = make_profile(*(make_timing(size) for size in (1, 4, 16)), slow)
    answer = profile.batch_for(latency_ms=1e6)
    assert answer.batch_size == 16
    assert "larger ones were measured with fewer" in answer.reason


def test_fresh_calls_tell_of_sizes_that_the_rounds_had_too_little_time_for():
    timings = (make_timing(1), make_timing(8), make_timing(64, calls=20))
    calls = [time_s(32) * (1 + 0.01 * (i % 5)) for i in range(59)]
    checks = (check(32, calls, best=True, latency_ms=6.0),)
    with pytest.raises(TargetTooLow):
        make_profile(*timings, checks=checks).batch_for(latency_ms=0.1)
    answer = make_profile(*timings, checks=checks).batch_for(latency_ms=1000 * time_s(20) * 1.02)
    assert answer.batch_size == pytest.approx(20, abs=2)
    assert make_profile(*timings).batch_for(latency_ms=1000 * time_s(20)).batch_size == 8


def test_a_verified_target_is_answered_by_its_check_and_another_by_the_fit():
    profile = make_profile(
        checks=(
            check(38, [0.0049] * 59 + [0.0051] * 40, best=False),
            check(33, [0.0045] * 59, best=True),
        )
    )
    answer = profile.batch_for(latency_ms=5)
    assert (answer.batch_size, answer.verified) == (33, True)
    assert answer.interval is not None
    assert not profile.batch_for(latency_ms=5, quantile=0.5).verified
    assert not profile.batch_for(latency_ms=5.1).verified


def test_a_check_below_the_measured_sizes_answers_looser_targets_too():
    profile = make_profile(
        make_timing(64), make_timing(128), checks=(check(12, [0.004] * 59, best=True),)
    )
    assert "smallest size of the sweep, 64" in profile.batch_for(latency_ms=5).reason
    later = profile.batch_for(latency_ms=6)
    assert (later.batch_size, later.verified) == (12, False)
    with pytest.raises(TargetTooLow, match=r"batch size 64 takes.*measure smaller batch sizes"):
        profile.batch_for(latency_ms=4)


def test_room_for_slower_times_is_part_of_what_is_verified():
    fresh = check(33, [0.0045] * 59, best=True)
    assert dataclasses.replace(fresh, drift=0.1).verified
    assert not dataclasses.replace(fresh, drift=0.12).verified
    answer = make_profile(checks=(dataclasses.replace(fresh, drift=0.1),)).batch_for(latency_ms=5)
    assert "with room for calls 10 % slower" in answer.reason


def test_rounds_beside_a_neighbour_do_not_move_the_answers():
    def slowed(timing):
        many = timing.batch_size in (1, 4, 16)  # Beside these, the median is the neighbour's.
        factors = [1, 1, 1, 1.6, 1.9, 2, 2.5, 3] if many else [1] * 8
        shuffled = np.random.default_rng(timing.batch_size).permutation(factors)
        blocks = tuple(float(v) for v in shuffled * np.array(timing.block_medians_s))
        return dataclasses.replace(timing, block_medians_s=blocks)

    quiet = make_profile(*(make_timing(size) for size in (1, 2, 4, 8, 16, 32, 64)))
    noisy = make_profile(*map(slowed, quiet.timings))
    assert quiet.disturbed_share == 0
    assert noisy.disturbed_share == pytest.approx(3 * 5 / (7 * 8))
    assert noisy.knee.batch_size == pytest.approx(HALF_PEAK, abs=1)
    assert noisy.efficient.batch_size == pytest.approx(9 * HALF_PEAK, rel=0.1)
    assert round_noise(noisy.timings) > 2 * round_noise(quiet.timings)


@pytest.mark.parametrize(
    ("latencies_s", "verified", "exceeded"),
    [
        ([0.005] * 59, True, 0),
        ([0.005] * 58, False, 0),
        ([0.005] * 58 + [0.0051], False, 1),
        ([0.005] * 92 + [0.0051], True, 1),
    ],
)
def test_a_check_verifies_with_95_percent_confidence(latencies_s, verified, exceeded):
    found = check(8, latencies_s, best=True)
    assert (found.verified, found.exceeded) == (verified, exceeded)


def test_a_part_is_selected_by_path_and_policy():
    profile = make_profile(
        make_timing(1),
        make_timing(8),
        make_timing(1, path="xla", scale=0.5),
        make_timing(8, path="xla", scale=0.5),
        make_timing(8, path="xla", policy="int8"),
        checks=(check(8, [0.004] * 59, best=True),),
    )
    part = profile.select(call_path="xla")
    assert part.series == (("xla", "float32"), ("xla", "int8"))
    assert part.checks == ()
    assert (part.twin, part.noise_floor) == (None, None)  # It was made with another path.
    assert profile.select(call_path="compiled").twin == profile.twin
    assert part.select(dtype_policy="int8").memory == ()
    with pytest.raises(ValueError, match=r"compiled under float32.*select one of them"):
        profile.select(call_path="eager")


def test_a_bulk_call_counts_the_share_of_a_batch_and_has_no_latency():
    calls = make_timing(8, path="predict", examples_per_call=80, block_medians_s=(1.0,) * 8)
    assert calls.batch_time_s == pytest.approx(0.1)
    assert calls.samples_per_second == pytest.approx(80)
    profile = make_profile(calls, make_timing(16, path="predict", examples_per_call=80))
    with pytest.raises(ValueError, match="Bulk prediction"):
        profile.batch_for(latency_ms=5)
    assert profile.to_dataframe().latency_bound_ms.isna().all()


def test_the_table_has_a_row_a_setting_and_unknown_is_missing():
    profile = make_profile(make_timing(1), make_timing(4, calls=30), make_failed(128))
    table = profile.to_dataframe()
    assert list(table.batch_size) == [1, 4, 128]
    assert list(table.outcome) == ["measured", "measured", "out_of_memory"]
    assert table.batch_time_ms[0] == pytest.approx(1000 * time_s(1), rel=0.02)
    assert table.missing_calls[1] == 29
    assert table[["batch_time_ms", "samples_per_second"]].isna().iloc[2].all()
    assert table.latency_bound_ms.isna().tolist() == [False, True, True]
    assert table.peak_memory_bytes[0] == 2**24 + 2**18
    assert "copy_ms" in table


def test_memory_of_any_batch_is_read_off_the_line():
    profile = make_profile()
    assert profile.predict_memory_bytes(1000) == pytest.approx(2**24 + 1000 * 2**18)
    with pytest.raises(ValueError, match="measure_memory=True"):
        make_profile(memory=(make_memory(1),)).predict_memory_bytes(8)


FEW_CALLS = (make_timing(1, calls=20), *map(make_timing, (8, 16, 32)))
NO_ANSWER = [
    *(((), {"latency_ms": t}, "positive number, in milliseconds") for t in (0, -1, np.inf, np.nan)),
    *(((), {"latency_ms": 5, "quantile": q}, "between 0 and 1") for q in (0, 1, 1.5)),
    ((), {"latency_ms": 5, "quantile": 0.99}, rf"needs 299 calls.*1: {299 - 120}"),
    (FEW_CALLS, {"latency_ms": 1.4}, "Sizes below 8 have too few calls"),
    ((make_timing(8, path="predict", examples_per_call=80),), {"latency_ms": 5}, "Bulk prediction"),
]


@pytest.mark.parametrize(("timings", "asked", "message"), NO_ANSWER)
def test_what_no_calls_answer_says_why(timings, asked, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_profile(*timings).batch_for(**asked)
    assert not isinstance(caught.value, TargetTooLow)


def test_what_was_not_measured_says_how_to_measure_it():
    with pytest.raises(ValueError, match="two measured batch sizes"):
        _ = make_profile(make_timing(1), make_failed(2)).knee
    with pytest.raises(ValueError, match="measure_memory=True"):
        make_profile(memory=(make_memory(1),)).predict_memory_bytes(8)


def test_the_noise_floor_is_the_farther_end_of_the_interval_of_the_twins():
    assert make_profile().noise_floor == pytest.approx(0.03)
    assert make_profile(twin=None).noise_floor is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimingRecord("compiled", "float32", 1, "fast"), "must be one of"),
        (lambda: TimingRecord("compiled", "float32", 1, "measured"), "if, and only if"),
        (lambda: make_timing(1, outcome="not_run"), "if, and only if"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_answers_outside_the_measured_sizes_say_so():
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4, 8)))
    answer = profile.efficient
    assert answer.batch_size > 8
    assert answer.extrapolated
    assert "beyond the largest measured size, 8" in answer.reason
    above = make_profile(*(make_timing(size) for size in (32, 64, 128))).knee
    assert above.extrapolated
    assert "below the smallest measured size, 32" in above.reason
    assert not make_profile().knee.extrapolated
    assert "measured size" not in make_profile().knee.reason


@pytest.mark.parametrize("target_ms", [7.4 * 1.025, 1000])
def test_an_answer_at_the_largest_measured_size_says_that_larger_ones_were_not_tried(target_ms):
    answer = make_profile().batch_for(latency_ms=target_ms)
    assert answer.batch_size == 64
    assert "largest measured" in answer.reason
    assert answer.interval.low <= 65  # Of the size before it was made whole.
    assert answer.interval.high >= 64


def test_no_answer_contradicts_the_checks_and_all_of_them_are_in_order():
    missed, kept = check(38, [0.0060] * 60, best=False), check(33, [0.0045] * 59, best=True)
    profile = make_profile(checks=(missed, kept))
    targets_ms = [*np.linspace(1.2, 7.0, 25), 4.9, 5.0, 5.1]
    found = [profile.batch_for(latency_ms=float(t)) for t in sorted(targets_ms)]
    sizes = [answer.batch_size for answer in found]
    assert sizes == sorted(sizes)
    assert all(s <= 33 for s, t in zip(sizes, sorted(targets_ms), strict=True) if t <= 5)
    assert all(s >= 33 for s, t in zip(sizes, sorted(targets_ms), strict=True) if t >= 5)
    tight = profile.batch_for(latency_ms=4.9)
    assert "leave no larger size" in tight.reason
    assert tight.interval.low <= tight.batch_size <= tight.interval.high


def test_a_size_that_missed_the_target_is_not_answered():
    profile = make_profile(checks=(check(20, [0.0060] * 60, best=False),))
    assert profile.batch_for(latency_ms=5).batch_size == 19
    assert profile.batch_for(latency_ms=4, quantile=0.99 - 0.04).batch_size == 19
    assert profile.batch_for(latency_ms=5.5).batch_size > 30
    none = make_profile(checks=(check(1, [0.0060] * 60, best=False),))
    with pytest.raises(ValueError, match="batch size 1 did not keep"):
        none.batch_for(latency_ms=5)
