import dataclasses

import numpy as np
from inference_factory import make_failed, make_profile, make_timing
from records_factory import make_gpu

from kbatch.inference.record import OutputChange, TargetCheck, TwinRecord
from kbatch.inference.report import inference_section

CHECK = TargetCheck("compiled", "float32", 33, 5.0, 0.95, (0.004,) * 59, True)


def lines_of(profile):
    section = inference_section(profile)
    return [*section.lead, *section.details, *(note.text for note in section.notes)]


def test_the_answers_stand_with_what_a_reader_must_know():
    profile = make_profile(checks=(CHECK,), notes=("mind this",))
    section = inference_section(profile)
    assert section.headline.startswith("Batch size 33 is the largest with 95 % of the calls")
    assert section.lead[0].startswith("Verified by 59 fresh calls, 0 above the target")
    answers = {row.texts[0]: row for row in section.tables[0].rows}
    assert answers["Within 5 ms at the 0.95 quantile"].best
    assert answers["Largest throughput over latency"].texts[1] == "10"
    assert "mind this" in lines_of(profile)
    assert "Equal settings differed by up to 3 % here (A/A test)" in " ".join(lines_of(profile))
    missed = dataclasses.replace(CHECK, latency_ms=0.1, best=False)
    (first, *_) = inference_section(make_profile(checks=(missed,))).tables[0].rows
    assert first.texts[:2] == ("Within 0.1 ms at the 0.95 quantile", "n/a")
    assert "(compiled, float32)" in inference_section(make_profile()).headline


def test_what_was_not_timed_is_told_with_the_reason():
    late = [make_failed(size, "not_run") for size in (32, 64)]
    late = [dataclasses.replace(timing, reason="beyond the latency target") for timing in late]
    profile = make_profile(make_timing(1), make_timing(8), *late, make_failed(8, path="xla"))
    assert [line for line in lines_of(profile) if line.startswith("Not timed")] == [
        "Not timed: compiled under float32 at batch size 32 and 64: beyond the latency target.",
        "Not timed: xla under float32 at batch size 8: memory ran out when it was probed.",
    ]
    assert not any("Not timed" in line for line in lines_of(make_profile()))


def test_times_that_are_not_settled_are_counted():
    few = make_timing(8, block_medians_s=(0.01, 0.01, 0.02), block_rounds=(0, 1, 2))
    wide = make_timing(64, noise=0.2)
    line = "2 of 3 times may be off by more than 5 % (the least timed has 3 rounds): "
    found = lines_of(make_profile(make_timing(1), few, wide, make_failed(128)))
    assert any(words.startswith(line) for words in found)
    assert not any("may be off" in words for words in lines_of(make_profile()))


def test_a_noise_floor_that_is_not_known_says_why():
    few = TwinRecord("compiled", "float32", 8, (0.01, 0.02))
    line = "unknown: it takes 6 rounds, and there was time for 2. Raise `time_budget_s`."
    assert f"The noise floor (A/A test) is {line}" in lines_of(make_profile(twin=few))
    assert not any("A/A" in words for words in lines_of(make_profile(twin=None)))


def fit_line(profile):
    (line,) = [line for line in lines_of(profile) if line.startswith("Fit: ")]
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
    assert not any(line.startswith("Fit") for line in lines_of(make_profile(flat[0])))


def test_rounds_that_the_fit_leaves_out_are_counted():
    blocks = (0.0011, 0.0011, 0.0011, 0.002)
    profile = make_profile(
        *(make_timing(size, block_medians_s=tuple(size * s for s in blocks)) for size in (1, 2, 4))
    )
    assert "Left out of the fit as outliers: 25 % of the rounds." in lines_of(profile)
    assert not any("Left out" in line for line in lines_of(make_profile()))


def test_the_change_of_the_outputs_is_told():
    change = OutputChange("int8", 32, 0.02, 0.001, 0.04, 0.012)
    lines = lines_of(make_profile(output_changes=(change,)))
    (words,) = [line for line in lines if line.startswith("Outputs under int8, 32 examples")]
    assert "1.20 % from those in float32 on average" in words
    assert "at most 4.00 % of the largest output" in words
    broken = dataclasses.replace(change, mean_relative=None)
    assert any("not finite" in line for line in lines_of(make_profile(output_changes=(broken,))))


def timings(profile):
    table = inference_section(profile).tables[1]
    return table.headers, [row.texts for row in table.rows]


def test_the_table_says_how_many_calls_are_missing():
    titles, rows = timings(make_profile())
    assert len(rows[0]) == len(titles)
    assert rows[0][:3] == ("compiled", "float32", "1")
    few = timings(make_profile(quantile=0.99))[1]
    assert few[0][5] == "needs 179 more"


def test_the_copy_to_a_gpu_has_a_column_of_its_own():
    profile = make_profile(make_timing(1, copy_s=0.002), make_timing(8))
    titles, rows = timings(profile)
    assert titles[-1] == "Copy (ms)"
    assert [row[-1] for row in rows] == ["2.00", "n/a"]
    assert "Copy (ms)" not in timings(make_profile())[0]


def test_bulk_calls_have_no_latency_of_a_batch():
    rows = timings(make_profile(make_timing(8, path="predict")))[1]
    assert rows[0][5] == "n/a (bulk)"


def test_a_throttled_gpu_is_one_line():
    throttled = lines_of(make_profile(gpus=(make_gpu(throttled=("power cap",)),) * 2))
    (line,) = [line for line in throttled if "throttled" in line]
    assert "(power cap)" in line
    assert not any("throttled" in line for line in lines_of(make_profile(gpus=(make_gpu(),))))
