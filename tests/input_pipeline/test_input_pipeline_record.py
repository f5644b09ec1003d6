import dataclasses

import pytest
from input_profile_factory import (
    make_long_run,
    make_profile,
    make_rate,
    make_remedy,
)

from kbatch.input_pipeline.record import RateRecord


@pytest.mark.parametrize(
    ("pipeline", "step", "verdict"),
    [
        (800, 2400, "input-bound"),
        (2400, 800, "compute-bound"),
        (1000, 1010, "undetermined"),
    ],
)
def test_the_verdict_follows_from_the_rates(pipeline, step, verdict):
    profile = make_profile(pipeline=pipeline, step=step)
    assert profile.verdict == verdict
    assert profile.ratio.value == pytest.approx(pipeline / step)
    assert profile.serial < profile.overlapped == pytest.approx(min(pipeline, step))


@pytest.mark.parametrize(
    ("bounds", "verdict", "even"),
    [
        ((2300,), "compute-bound", True),
        ((1900, 2400), "compute-bound", True),
        ((400,), "input-bound", False),
        ((400, 2400), "undetermined", False),
    ],
)
def test_a_long_reading_that_differs_from_the_rounds_decides(bounds, verdict, even):
    long_run = make_long_run(*bounds, waiting=None if even else 0.6)
    profile = make_profile(pipeline=2400, step=800, wait_share=0.02, long_run=long_run)
    assert (profile.verdict, profile.is_even) == (verdict, even)
    assert profile.wait_share == pytest.approx(0.02 if even else 0.6)
    assert (profile.crossing is None) is not even
    assert (profile.serial is None) is not even


def test_rates_shares_and_the_crossing_are_derived():
    profile = make_profile()
    assert profile.pipeline.samples_per_second.value == pytest.approx(800)
    assert profile.wait_share == pytest.approx(0.66)
    assert profile.pipeline.busy_cores == pytest.approx(1.5)
    # t = b (16 + B) with 80 b = 64/2400; the pipeline needs 1/800 an example.
    slope_s = 64 / 2400 / 80
    expected = 16 * slope_s / (1 / 800 - slope_s)
    assert profile.crossing.batch_size.value == pytest.approx(expected, rel=0.01)
    assert profile.crossing.step.holds
    assert make_profile(smaller_steps=()).crossing is None


def test_remedies_come_best_first_with_paired_gains():
    assert [r.name for r in make_profile().best_first] == ["cache", "parallel map", "prefetch"]
    gain = make_remedy(gain=1.9).gain
    assert gain.value == pytest.approx(1.9)
    assert (gain.low, gain.high) == pytest.approx((1.9, 1.9))


def test_what_was_not_measured_is_none():
    rate = RateRecord((), ())
    assert (rate.samples_per_second, rate.wait_share, rate.busy_cores) == (None, None, None)
    empty = make_profile(pipeline=1, step=1)
    empty = dataclasses.replace(empty, pipeline=rate, step=rate, together=rate, remedies=())
    assert (empty.verdict, empty.ratio, empty.crossing) == ("undetermined", None, None)
    assert (empty.overlapped, empty.serial) == (None, None)


def test_rounds_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="one value a round"):
        RateRecord((1, 2), (1.0,))
    with pytest.raises(ValueError, match="one value a round"):
        RateRecord((1, 2), (1.0, 1.0), cpu_s=(1.0,))
    with pytest.raises(ValueError, match="same rounds"):
        dataclasses.replace(make_profile(), step=make_rate(2400, rounds=4))
    with pytest.raises(ValueError, match="`source` must be"):
        make_profile(source="files")


def test_the_table_has_a_row_for_each_contender_and_round():
    profile = make_profile()
    table = profile.to_dataframe()
    assert list(table.columns) == [
        *("contender", "round", "examples", "duration_s", "samples_per_second", "wait_s", "cpu_s")
    ]
    assert len(table) == 5 * (5 + 2 * len(profile.remedies))
    step = table[table.contender == "step"]
    assert list(step.samples_per_second) == list(profile.step.rates)
    assert step.wait_s.isna().all()
    assert (table[table.contender == "together"].wait_s > 0).all()


def make_disturbed_step(rates=(449, 2550, 2400, 11_700, 2700)):
    """A train step alone that something else slowed in most rounds."""
    return RateRecord((640,) * len(rates), tuple(640 / rate for rate in rates))


@pytest.mark.parametrize(
    ("changed", "disturbed"),
    [
        # Seen on a busy machine; the pipeline alone was the faster one in every round.
        ({"pipeline": 100_000, "step": make_disturbed_step(), "together": 9610}, ("step",)),
        ({"pipeline": 2400, "step": 800, "together": 900}, ("step",)),
        ({"pipeline": 800, "step": 2400, "together": 900}, ("pipeline",)),
        ({"pipeline": 2400, "step": 800, "together": 2700}, ("step", "pipeline")),
        ({"pipeline": 2400, "step": 800, "together": 830}, ()),
        ({"pipeline": 800, "step": 2400, "together": 830}, ()),
    ],
)
def test_training_faster_than_a_side_alone_leaves_no_verdict(changed, disturbed):
    profile = make_profile(
        **{n: rate if isinstance(rate, int) else 800 for n, rate in changed.items()}
    )
    if isinstance(changed["step"], RateRecord):
        profile = dataclasses.replace(profile, step=changed["step"])
    assert profile.disturbed == disturbed
    assert (profile.verdict == "undetermined") == bool(disturbed)
    assert (profile.overlapped is None) == (profile.crossing is None) == bool(disturbed)


def test_what_cannot_be_compared_is_no_sign_of_a_disturbance():
    faster = {"pipeline": 800, "step": 2400, "together": 1600}
    assert make_profile(**faster).verdict == "undetermined"
    # Training may end before a pause of the pipeline that a long reading counts.
    assert make_profile(**faster, long_run=make_long_run(800)).verdict == "input-bound"
    # The rounds trained on shorter texts than those that were read.
    assert make_profile(**faster, together_comparable=False).verdict == "input-bound"
