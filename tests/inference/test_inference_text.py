import dataclasses

import numpy as np
from inference_factory import make_failed, make_profile, make_timing

from kbatch.inference.figures import conditions_line
from kbatch.inference.record import OutputChange, TargetCheck, TwinRecord
from kbatch.inference.report import (
    inference_lines,
    inference_rows,
    left_out_lines,
    unsettled_lines,
)

CHECK = TargetCheck("compiled", "float32", 33, 5.0, 0.95, (0.004,) * 59, True)


def test_the_answers_are_lines_with_what_a_reader_must_know():
    profile = make_profile(checks=(CHECK,), notes=("mind this",))
    lines = inference_lines(profile, 5.0)
    assert lines == inference_lines(profile)
    assert lines[0].startswith("within 5 ms at the 0.95 quantile: batch size 33, verified")
    assert lines[2].startswith("knee: batch size 1")
    assert "95 % interval" in lines[2]
    assert lines[-1] == "note: mind this"
    assert "noise floor (A/A test): 3 %" in lines
    assert "answers refer to compiled under float32" in lines
    assert "n/a" in inference_lines(profile, 0.1)[0]
    assert inference_lines(make_profile())[0].startswith("efficient")


def test_what_was_not_timed_is_told_with_the_reason():
    late = [make_failed(size, "not_run") for size in (32, 64)]
    late = [dataclasses.replace(timing, reason="beyond the latency target") for timing in late]
    profile = make_profile(make_timing(1), make_timing(8), *late, make_failed(8, path="xla"))
    assert left_out_lines(profile) == [
        "not timed: compiled under float32 at batch size 32 and 64: beyond the latency target",
        "not timed: xla under float32 at batch size 8: memory ran out when it was probed",
    ]
    assert set(left_out_lines(profile)) < set(inference_lines(profile))
    assert left_out_lines(make_profile()) == []


def test_times_that_are_not_settled_are_counted():
    few = make_timing(8, block_medians_s=(0.01, 0.01, 0.02), block_rounds=(0, 1, 2))
    wide = make_timing(64, noise=0.2)
    (line,) = unsettled_lines(make_profile(make_timing(1), few, wide, make_failed(128)))
    assert line.startswith(
        "2 of 3 times may be off by more than 5 % (the least timed has 3 rounds): "
    )
    assert line in inference_lines(make_profile(make_timing(1), few, wide, make_failed(128)))
    assert unsettled_lines(make_profile()) == []


def test_a_noise_floor_that_is_not_known_says_why():
    few = TwinRecord("compiled", "float32", 8, (0.01, 0.02))
    line = "noise floor (A/A test): n/a (6 rounds show it, 2 were made: give more time)"
    assert line in inference_lines(make_profile(twin=few))
    assert not any("noise floor" in words for words in inference_lines(make_profile(twin=None)))


def fit_line(profile):
    (line,) = [line for line in inference_lines(profile) if line.startswith("fit: ")]
    return line


def test_the_fit_has_both_parameters_with_intervals():
    words = fit_line(make_profile())
    latency = make_profile().latency
    assert f"r_inf {latency.peak_throughput.value:,.0f}"[:8] in words
    assert "n_half" in words
    assert words.count("95 % interval") == 2


def test_lack_of_fit_is_said():
    stairs = [make_timing(size, scale=1 + (size > 8)) for size in (1, 2, 4, 8, 16, 32)]
    words = fit_line(make_profile(*stairs))
    worst = make_profile(*stairs).latency.line.departure.worst
    assert f"the times deviate from it by up to {100 * worst:.0f} %" in words
    flat = [
        make_timing(size, block_medians_s=tuple(0.01 + 0.0001 * np.arange(8)))
        for size in (1, 2, 4, 8)
    ]
    assert "may not grow with the batch" in fit_line(make_profile(*flat))
    assert not any(line.startswith("fit") for line in inference_lines(make_profile(flat[0])))


def test_rounds_that_the_fit_leaves_out_are_counted():
    blocks = (0.0011, 0.0011, 0.0011, 0.002)
    profile = make_profile(
        *(make_timing(size, block_medians_s=tuple(size * s for s in blocks)) for size in (1, 2, 4))
    )
    assert "left out of the fit as outliers: 25 % of the rounds" in (inference_lines(profile))
    assert not any("left out" in line for line in inference_lines(make_profile()))


def test_the_change_of_the_outputs_is_told():
    change = OutputChange("int8", 32, 0.02, 0.001, 0.04, 0.012)
    lines = inference_lines(make_profile(output_changes=(change,)))
    (words,) = [line for line in lines if line.startswith("outputs under int8, 32 examples")]
    assert "1.20 % from those in float32 on average" in words
    assert "at most 4.00 % of the largest output" in words
    broken = dataclasses.replace(change, mean_relative=None)
    assert any(
        "not finite" in line for line in inference_lines(make_profile(output_changes=(broken,)))
    )


def test_the_table_says_how_many_calls_are_missing():
    titles, rows = inference_rows(make_profile())
    assert len(rows[0]) == len(titles)
    assert rows[0][:3] == ("compiled", "float32", "1")
    few = inference_rows(make_profile(quantile=0.99))[1]
    assert few[0][5] == "needs 179 more"


def test_the_copy_to_a_gpu_has_a_column_of_its_own():
    profile = make_profile(make_timing(1, copy_s=0.002), make_timing(8))
    titles, rows = inference_rows(profile)
    assert titles[-1] == "copy (ms)"
    assert [row[-1] for row in rows] == ["2.00", "n/a"]
    assert "copy (ms)" not in inference_rows(make_profile())[0]


def test_bulk_calls_have_no_latency_of_a_batch():
    rows = inference_rows(make_profile(make_timing(8, path="predict")))[1]
    assert rows[0][5] == "n/a (bulk)"


def test_batches_that_ran_at_other_clocks_are_told():
    clocks_mhz = {1: 1400.0, 8: 1980.0, 64: 1970.0}
    timings = [make_timing(b, sm_clocks_mhz=(mhz,) * 8) for b, mhz in clocks_mhz.items()]
    profile = make_profile(*timings)
    apart = (
        "GPU clock from 1,400 MHz at 1 (compiled, float32) to 1,980 MHz at 8 (compiled, float32)"
    )
    assert any(apart in line for line in inference_lines(profile))
    assert apart in conditions_line(profile)
    assert "clock" not in conditions_line(make_profile(*timings[1:]))
