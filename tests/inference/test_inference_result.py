"""The answers, the table and the figures of an inference profile."""

import numpy as np
import pytest
from figure_samples import shown_texts, text_overlaps, words
from inference_factory import (
    HALF_PEAK,
    make_check,
    make_failed,
    make_memory,
    make_profile,
    make_timing,
    time_s,
)

import kbatch
from kbatch.analysis.intervals import Estimate
from kbatch.errors import TargetTooLow
from kbatch.inference.result import InferenceAnswer, SizeEffect
from kbatch.inference.target_search import expected_drift
from kbatch.plotting import canvas
from kbatch.records.notes import Note

NAMES = ("throughput", "operating_curve", "memory")
PLOTS = {name: getattr(kbatch, f"plot_inference_{name}") for name in NAMES}


def with_target(*checks, timings=(), target_ms=5.0, **changed):
    return make_profile(*timings, checks=checks, target_ms=target_ms, **changed)


def test_profile_answers_follow_from_the_fitted_line():
    profile = make_profile()
    assert profile.latency.follows_line
    assert profile.knee.batch_size == pytest.approx(HALF_PEAK, abs=1)
    assert profile.efficient.batch_size == pytest.approx(9 * HALF_PEAK, rel=0.1)
    assert profile.fastest.batch_size == 64
    for answer in (profile.knee, profile.efficient):
        assert answer.interval.low <= answer.batch_size <= answer.interval.high + 1
        assert not answer.verified


def test_profile_with_the_peak_at_its_largest_size_advises_larger_sizes():
    stairs = [make_timing(2**i, scale=1 + (i > 3)) for i in range(6)]  # No line, and still rising.
    line = [make_timing(2**i) for i in range(8)]  # The fit has 90 % of the peak at 90.
    timings = (stairs, [*stairs, make_failed(64)], line, line[:-1])
    profiles = [make_profile(*each) for each in timings]
    assert ["of sizes up to 32 " in each.answer for each in profiles] == [1, 1, 0, 0]
    assert [len(each.notes) for each in profiles] == [1, 0, 0, 1]
    # The headline names no size above the measured ones, and the fit is used up to a factor of 2.
    assert [each.answer.split()[2] for each in profiles[2:]] == ["90", "64"]
    assert profiles[3].efficient.extrapolated
    few = make_profile(make_timing(1), make_timing(8))
    assert few.answer.startswith("Batch size 8 has the largest throughput of sizes up to 8 ")
    assert [few.knee.extrapolated, "efficient" in few.answers] == [True, False]
    assert not make_profile(*stairs, target_ms=5.0).notes
    # The fit cannot fall, but the measured times of the last two sizes do.
    slow, fast = make_timing(1, times_s=(0.3,) * 8), make_timing(16, times_s=(0.2,) * 8)
    profile = make_profile(slow, fast)
    rates = profile.table()["samples/s"]
    assert [note.values["gain"] for note in profile.notes] == ["24.0"]
    assert rates[1] / rates[0] == pytest.approx(24.0)


@pytest.mark.parametrize("target_ms", [1.5, 2.0, 3.0, 5.0, 7.0])
@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_batch_for_is_the_largest_size_within_the_target(target_ms, quantile):
    answer = make_profile().batch_for(latency_ms=target_ms, quantile=quantile)
    ideal = target_ms * 10 / 1.016 ** (quantile > 0.5) - HALF_PEAK
    assert abs(answer.batch_size - ideal) <= 1 + 0.05 * ideal
    assert answer.interval.low <= answer.batch_size + 1
    assert answer.interval.high >= answer.batch_size
    assert f"{answer.batch_size} ({int(answer.interval.low)} to " in str(answer)
    assert not answer.verified


@pytest.mark.parametrize("scale", [0.85, 1.0, 1.15])
def test_batch_for_names_a_latency_that_can_be_reached(scale):
    """The fit and the measured times of one example may differ."""
    others = (make_timing(size, noise=0.2) for size in (2, 4, 8, 16, 32, 64))
    profile = make_profile(make_timing(1, scale=scale, noise=0.2), *others)
    for target_ms in np.linspace(0.8, 2.0, 13):
        try:
            assert profile.batch_for(latency_ms=target_ms).batch_size >= 1
        except TargetTooLow as error:
            assert error.reachable_ms > target_ms
            reachable_ms = error.reachable_ms
    assert profile.batch_for(latency_ms=1.01 * reachable_ms).batch_size >= 1


def test_batch_for_uses_fresh_calls_of_sizes_with_too_few_timings():
    timings = (make_timing(1), make_timing(8), make_timing(64, calls=20))
    calls = [time_s(32) * (1 + 0.01 * (i % 5)) for i in range(59)]
    profile = with_target(make_check(32, latencies_s=calls), timings=timings, target_ms=6.0)
    with pytest.raises(TargetTooLow):
        profile.batch_for(latency_ms=0.1)
    answer = profile.batch_for(latency_ms=1000 * time_s(20) * 1.02)
    assert answer.batch_size == pytest.approx(20, abs=2)
    answer = make_profile(*timings).batch_for(latency_ms=1000 * time_s(20))
    assert (answer.batch_size, answer.interval.ends) == (8, None)


def test_batch_for_is_verified_only_for_the_target_of_the_checks():
    profile = with_target(make_check(38, outcome="missed"), make_check(33))
    answer = profile.batch_for(latency_ms=5)
    assert (answer.batch_size, answer.verified) == (33, True)
    assert "33 is the largest with" in profile.answer  # A larger size was called, too.
    loose = with_target(make_check(64)).answer
    assert loose.startswith("Batch size 64 is the largest of sizes up to 64 with")
    assert not profile.batch_for(latency_ms=5, quantile=0.5).verified
    assert not profile.batch_for(latency_ms=5.1).verified
    table = profile.table()  # The sweep does not have size 33, but the further calls have a row.
    (row,) = table.attrs["answer"]
    assert (table["batch size"][row], table["p95 at most (ms)"][row]) == (33, 4.0)
    assert table["outcome"][row] == "60 further calls, 0 above 5 ms: verified"
    assert not profile.notes


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ((), "Batch sizes 2 to 7 may"),  # 8 missed the target in the sweep.
        ((make_check(2, outcome="missed"),), "is the largest with"),
        ((make_check(2, outcome="missed", latencies_s=[0.004] * 60),), "Batch sizes 2 to 7 may"),
        ((make_check(2, outcome="unsure"), make_check(3, outcome="missed")), "Batch size 2 may"),
    ],
)
def test_largest_is_claimed_only_if_the_next_size_is_refuted(others, words):
    timings = make_timing(1), make_timing(8, scale=4)
    checks = (make_check(1, latencies_s=[0.001] * 138), *others)
    answer = with_target(*checks, timings=timings).answer
    assert answer.startswith("Batch size 1 ") and words in answer
    assert ("largest" in answer) == ("largest" in words)


@pytest.mark.parametrize(("time_s", "is_named"), [(0.0037, 0), (0.0039, 1), (0.0043, 1)])
def test_use_names_a_smaller_size_within_5_percent_of_the_highest_throughput(time_s, is_named):
    """Size 16 predicts 16,000 samples/s. Size 64 meets the target with more, as many, or less."""
    timings = make_timing(16, times_s=(0.001,) * 8), make_timing(64, times_s=(time_s,) * 8)
    profile = with_target(make_check(64, latencies_s=[time_s] * 138), timings=timings)
    assert profile.batch_for(latency_ms=5).batch_size == 64
    assert ("throughput of batch size 16 " in profile.use) == is_named
    assert not make_profile(*timings).use  # Without a target, `efficient` is the answer.


@pytest.mark.parametrize(("slowest_s", "why"), [(0.0045, "margin of 20 %"), (0.004, "few calls")])
def test_answer_names_a_size_that_met_the_target_but_is_unsure(slowest_s, why):
    check = make_check(1, outcome="unsure", latencies_s=[slowest_s] * 59)
    profile = with_target(check, timings=(make_timing(1, calls=20), make_failed(8)))
    assert profile.answer.startswith("Batch size 1 had 95 % of the calls within 5 ms")
    settings = profile.settings["sizes checked by further calls"]
    for text in (profile.answer, profile.table()["outcome"].iloc[-1], settings):
        assert why in text
    with pytest.raises(ValueError, match=r"quieter machine.*1 unsure") as caught:
        profile.batch_for(latency_ms=5)
    assert "time_budget_s" not in str(caught.value)  # More time alone would not help.
    with pytest.raises(TargetTooLow) as too_low:
        with_target(make_check(1, outcome="missed"), timings=profile.timings).batch_for(
            latency_ms=5
        )
    assert too_low.value.reachable_ms == 6.0


@pytest.mark.parametrize(
    "checks",
    [(), (make_check(38, outcome="missed"),), (make_check(20, outcome="unsure"),)],
    ids=["none", "missed", "unsure"],
)
def test_page_and_figure_show_the_same_answer_to_a_target(checks):
    profile = with_target(*checks, noted=(Note.of("target_not_verified"),))
    answer = profile.batch_for(latency_ms=5)
    assert not answer.verified and 30 < answer.batch_size < 40
    assert profile.answer.startswith(f"Batch size {answer.batch_size} is probably the largest with")
    assert str(profile).count("verified") == 1
    assert not {"efficient", "knee", "fastest"} & set(profile.settings)
    ax = kbatch.plot_inference_throughput(profile)
    text = words(ax)
    assert f"p95 within 5 ms: batch size {answer.batch_size}, not verified" in text
    assert f"probably: {answer.batch_size}" in text
    assert not [name for name in ("efficient", "knee", "fastest") if name in text]


def test_answer_interval_starts_at_one_example():
    assert "(1 to 8)" in str(InferenceAnswer(3, Estimate(3.4, 0.2, 8.9), "the fit"))


def test_plot_with_a_target_draws_the_quantile_and_the_median_as_a_thin_line():
    timings = [make_timing(size, noise=0.2) for size in (1, 8, 64)]
    profile = make_profile(*timings, target_ms=5.0)
    lower = kbatch.plot_inference_throughput(profile).figure.axes[1]
    quantiles = [1000 * np.quantile(timing.latencies_s, 0.95) for timing in timings]
    (curve,) = [line for line in lower.lines if line.get_label() == "compiled"]
    np.testing.assert_allclose(curve.get_ydata(), quantiles)
    (thin,) = [c for c in lower.lines if c.get_linewidth() < 1 and len(c.get_xdata()) > 2]
    np.testing.assert_allclose(thin.get_ydata()[0], 1000 * time_s(1), rtol=0.2)
    assert (lower.get_ylabel(), curve.get_linestyle()) == ("p95 time of a batch\n(ms)", "-")
    assert not lower.texts and "within 5 ms" in lower.get_title(loc="left")  # Covers no point.
    curve = kbatch.plot_inference_operating_curve(profile)
    np.testing.assert_allclose(curve.lines[0].get_xdata(), quantiles)
    assert "Hollow" not in words(curve) + words(lower)


@pytest.mark.parametrize("name", ["throughput", "operating_curve"])
def test_plots_show_a_quantile_of_too_few_calls_as_a_hollow_mark(name):
    profile = make_profile(make_timing(1), make_timing(8, calls=58), target_ms=5.0)
    figure = PLOTS[name](profile).figure
    (mark,) = [line for line in figure.axes[-1].lines if line.get_markerfacecolor() == canvas.PAPER]
    quantile_ms = 1000 * np.quantile(profile.timings[1].latencies_s, 0.95)
    assert quantile_ms in (*mark.get_xdata(), *mark.get_ydata())
    assert "Hollow: too few calls for the quantile." in words(figure.axes[-1])


@pytest.mark.parametrize("depends", [True, False])
def test_table_has_columns_of_size_effects_only_if_predictions_depend_on_the_size(depends):
    effects = SizeEffect(False, 1e-7, 0.0), SizeEffect(depends, 0.2 * depends, 0.0)
    timings = (make_timing(4 * n, size_effect=effect) for n, effect in enumerate(effects, 1))
    profile = make_profile(make_timing(1), *timings)
    columns = {"change by size (%)", "classes changed by size (%)"}
    assert columns & set(profile.table()) == (columns if depends else set())
    assert ("Predictions do not change with the batch size." in str(profile)) != depends
    assert "Predictions" not in str(make_profile())  # Outputs were not compared.


def test_batch_for_grows_with_the_target_and_agrees_with_the_checks():
    profile = with_target(make_check(38, outcome="missed"), make_check(33))
    targets_ms = sorted([*np.linspace(1.2, 7.0, 25), 4.9, 5.0, 5.1])
    sizes = [profile.batch_for(latency_ms=float(t)).batch_size for t in targets_ms]
    assert sizes == sorted(sizes)
    assert all(s <= 33 for s, t in zip(sizes, targets_ms, strict=True) if t <= 5)
    assert all(s >= 33 for s, t in zip(sizes, targets_ms, strict=True) if t >= 5)


def test_batch_for_is_below_a_size_that_missed_but_not_below_an_unsure_one():
    profile = with_target(make_check(20, outcome="missed"))
    answers = [profile.batch_for(latency_ms=target_ms) for target_ms in (4, 5)]
    assert [(answer.batch_size, answer.interval.ends) for answer in answers] == [(19, None)] * 2
    assert profile.batch_for(latency_ms=5.5).batch_size > 30
    with pytest.raises(TargetTooLow) as caught:
        with_target(make_check(1, outcome="missed")).batch_for(latency_ms=5)
    assert caught.value.reachable_ms == 6.0  # By the further calls. In the sweep it is 1.1 ms.
    unsure = with_target(make_check(20, outcome="unsure", latencies_s=[0.0049] * 58 + [0.006] * 2))
    assert unsure.batch_for(latency_ms=5) == make_profile().batch_for(latency_ms=5)
    row = "60 further calls, 2 above 5 ms: unsure, without a safety margin of 20 %"
    assert unsure.table()["outcome"].iloc[-1] == row


@pytest.mark.parametrize(
    ("check", "scale", "when"),
    [
        (make_check(4), 5.0, "while the table was measured"),
        (make_check(4, outcome="missed"), 1.0, "during the check"),
        (make_check(4), 1.0, None),
        (make_check(50, outcome="missed"), 1.0, None),
    ],
)
def test_notes_explain_fresh_calls_that_contradict_the_sweep(check, scale, when):
    timings = [make_timing(size, scale=scale) for size in (1, 8, 64)]
    values = [note.values["when"] for note in with_target(check, timings=timings).notes]
    assert values == [when] * (when is not None)


def test_expected_drift_grows_with_the_scatter_of_the_rounds():
    def timings(noise):
        return [make_timing(size, noise=noise) for size in (1, 2, 4, 8, 16, 32, 64)]

    assert expected_drift(timings(0.01)) == pytest.approx(0.2)
    assert expected_drift(timings(0.01)[:1]) == pytest.approx(0.2)
    assert expected_drift(timings(0.2)) == pytest.approx(1.645 * 0.2, rel=0.4)


def test_select_by_path_and_policy():
    timings = [make_timing(n, path=path) for path in ("compiled", "xla") for n in (1, 8)]
    timings.append(make_timing(8, path="xla", policy="int8"))
    profile = with_target(make_check(8), timings=timings)
    part = profile.select(call_path="xla")
    assert part.series == (("xla", "float32"), ("xla", "int8"))
    assert (part.checks, part.target_ms) == ((), None)  # The further calls used another path.
    assert profile.select(call_path="compiled").checks == profile.checks
    assert part.select(dtype_policy="int8").memory == ()
    with pytest.raises(ValueError, match=r"compiled under float32.*select one of them"):
        profile.select(call_path="eager")


def test_table_has_a_row_for_each_setting():
    effect = SizeEffect(True, 0.25, 0.1)
    timings = make_timing(1), make_timing(4, calls=30, size_effect=effect), make_failed(128)
    table = make_profile(*timings, output_changes={"float32": 0.01}).table()
    assert list(table["batch size"]) == [1, 4, 128]
    assert table["batch time (ms)"][0] == pytest.approx(1000 * time_s(1), rel=0.02)
    assert "29 more calls" in table["outcome"][1]
    assert "depend" in table["outcome"][1]
    assert "out of memory" in table["outcome"][2]
    assert table[["batch time (ms)", "samples/s"]].isna().iloc[2].all()
    assert table["p95 at most (ms)"].isna().tolist() == [False, True, True]
    assert table["peak memory (MiB)"][0] == 16.25
    assert table["change by size (%)"][1] == 25
    assert table["change from float32 (%)"][0] == 1


def test_predict_memory_bytes_follows_the_line():
    profile = make_profile()
    assert profile.predict_memory_bytes(1000) == pytest.approx(2**24 + 1000 * 2**18)
    with pytest.raises(ValueError, match="two or more"):
        make_profile(memory=(make_memory(1),)).predict_memory_bytes(8)


NO_ANSWER = [
    *(((), {"latency_ms": t}, "positive number of milliseconds") for t in (0, -1, np.inf, np.nan)),
    *(((), {"latency_ms": 5, "quantile": q}, "between 0 and 1") for q in (0, 1, 1.5)),
    ((), {"latency_ms": 5, "quantile": 0.99}, rf"needs 299 timed calls.*1: {299 - 120}"),
    ((make_timing(8, path="predict"),), {"latency_ms": 5}, "time of a single batch"),
]


@pytest.mark.parametrize(("timings", "arguments", "message"), NO_ANSWER)
def test_batch_for_refuses(timings, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_profile(*timings).batch_for(**arguments)
    assert not isinstance(caught.value, TargetTooLow)


def test_profile_of_one_size_has_no_answers():
    profile = make_profile(make_timing(1), make_failed(2))
    with pytest.raises(ValueError, match="two or more batch sizes"):
        _ = profile.knee
    assert profile.answers == {}
    assert "few calls" in profile.answer


def test_plot_throughput_draws_points_within_their_intervals():
    profile = make_profile()
    ax = kbatch.plot_inference_throughput(profile)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    for path in ("compiled", "xla"):
        rates = [t.rate.value for t in profile.select(call_path=path).answering]
        assert drawn[path] == rates
    for panel in ax.figure.axes:
        lines = [line for line in panel.lines if line.get_label()[0] != "_"]
        for line, bars in zip(lines, panel.collections, strict=True):
            for value, segment in zip(line.get_ydata(), bars.get_segments(), strict=True):
                assert segment[0][1] <= value <= segment[1][1]


def test_plot_throughput_draws_the_fit_or_joins_the_points():
    stairs = [make_timing(size, path="xla", scale=1 + (size > 8)) for size in (1, 2, 4, 8, 16, 32)]
    profile = make_profile(*(make_timing(size) for size in (1, 2, 4, 8, 16, 32)), *stairs)
    lower = kbatch.plot_inference_throughput(profile).figure.axes[1]
    styles = {drawn.get_label(): drawn.get_linestyle() for drawn in lower.lines}
    assert (styles["compiled"], styles["xla"]) == ("None", "-")
    (fitted,) = [line for line in lower.lines if len(line.get_xdata()) > 6]
    expected = [1000 * time_s(size) for size in fitted.get_xdata()]
    np.testing.assert_allclose(fitted.get_ydata(), expected, rtol=0.05)


def test_plot_throughput_explains_marks_that_are_close_together():
    failed = [make_failed(size) for size in range(60, 68)]
    figure = kbatch.plot_inference_throughput(make_profile(make_timing(1), *failed)).figure
    assert "✕: out of memory" in words(figure.axes[0])
    assert text_overlaps(shown_texts(figure)) == []


def test_plots_mark_the_target_and_sizes_out_of_memory():
    text = words(
        kbatch.plot_inference_throughput(
            make_profile(make_timing(1), make_timing(8), make_failed(64))
        )
    )
    assert "within" not in text
    assert "out of memory" in text
    missed = with_target(make_check(33, outcome="missed"))
    assert "batch size 32, not verified" in words(kbatch.plot_inference_throughput(missed))
    # A size that was not run for lack of memory does not extend the axis.
    assert kbatch.plot_inference_memory(make_profile()).get_xlim()[1] < 128
    text = words(kbatch.plot_inference_throughput(with_target(make_check(33))))
    for part in ("take: 33", "p95 within 5 ms: batch size 33", "8 rounds"):
        assert part in text


@pytest.mark.parametrize("name", PLOTS)
def test_plot_explains_its_marks_and_needs_data(name):
    text = words(PLOTS[name](make_profile()))
    assert ("Bars:" in text, "Dotted:" in text) == (name == "throughput", name == "memory")
    with pytest.raises(ValueError, match="Received"):
        PLOTS[name](make_profile(make_failed(1), memory=()))
    assert make_profile(make_failed(1), memory=()).figures() == ()
