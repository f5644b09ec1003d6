"""What is said beside the numbers: each caveat where it is so, and not elsewhere."""

import dataclasses

import numpy as np
import pytest
from inference_factory import make_check, make_failed, make_profile, make_timing

from kbatch.inference.record import OutputChange, TwinRecord
from kbatch.inference.report import inference_section


def lines_of(profile):
    section = inference_section(profile)
    return [*section.lead, *section.details, *(note.text for note in section.notes)]


def of_sizes(sizes=(1, 2, 4, 8), **changed):
    return make_profile(*(make_timing(size, **changed) for size in sizes))


LATE = [dataclasses.replace(make_failed(s, "not_run"), reason="too late") for s in (32, 64)]
FEW = make_timing(8, block_medians_s=(0.01, 0.01, 0.02), block_rounds=(0, 1, 2))
STAIRS = [make_timing(size, scale=1 + (size > 8)) for size in (1, 2, 4, 8, 16, 32)]
OUTLIERS = [
    make_timing(size, block_medians_s=tuple(size * s for s in (0.0011, 0.0011, 0.0011, 0.002)))
    for size in (1, 2, 4)
]
CHANGE = OutputChange("int8", 32, 0.02, 0.001, 0.04, 0.012)
SAID = {
    "not timed": (
        make_profile(make_timing(1), make_timing(8), *LATE),
        ("Not timed", "batch size 32 and 64: too late"),
    ),
    "unsettled": (
        make_profile(make_timing(1), FEW, make_timing(64, noise=0.2), make_failed(128)),
        ("may be off by more than 5 %", "2 of 3 times", "3 rounds"),
    ),
    "no noise floor": (
        make_profile(twin=TwinRecord("compiled", "float32", 8, (0.01, 0.02))),
        ("The noise floor (A/A test) is unknown", "6 rounds", "Raise `time_budget_s`"),
    ),
    "no line": (make_profile(*STAIRS), ("Fit: ", "the times deviate from it by up to")),
    "no slope": (
        of_sizes(block_medians_s=tuple(0.01 + 0.0001 * np.arange(8))),
        ("Fit: ", "may not grow with the batch"),
    ),
    "outliers": (make_profile(*OUTLIERS), ("Left out of the fit", "25 % of the rounds")),
    "changed outputs": (
        make_profile(output_changes=(CHANGE,)),
        ("Outputs under int8, 32 examples", "1.20 %", "at most 4.00 %"),
    ),
    "outputs that overflow": (
        make_profile(output_changes=(dataclasses.replace(CHANGE, mean_relative=None),)),
        ("Outputs under int8, 32 examples", "not finite"),
    ),
    "a note": (make_profile(notes=("mind this",)), ("mind this",)),
}


USUAL = " ".join(lines_of(make_profile()))


@pytest.mark.parametrize(("profile", "words"), SAID.values(), ids=SAID)
def test_a_caveat_is_said_where_it_is_so(profile, words):
    (line,) = [line for line in lines_of(profile) if words[0] in line]
    assert all(part in line for part in words)
    assert not all(part in USUAL for part in words)


def test_the_answers_stand_with_how_sure_they_are():
    section = inference_section(make_profile(checks=(make_check(33, [0.004] * 59),)))
    assert section.headline.startswith("Batch size 33 is the largest with 95 % of the calls")
    assert section.lead[0].startswith("Verified by 59 fresh calls, 0 above the target")
    answers = {row.texts[0]: row for row in section.tables[0].rows}
    assert answers["Within 5 ms at the 0.95 quantile"].best
    assert answers["Largest throughput over latency"].texts[1] == "10"
    assert "Equal settings differed by up to 3 % here (A/A test)" in " ".join(
        lines_of(make_profile())
    )
    missed = make_check(33, [0.004] * 59, latency_ms=0.1, best=False)
    (first, *_) = inference_section(make_profile(checks=(missed,))).tables[0].rows
    assert first.texts[:2] == ("Within 0.1 ms at the 0.95 quantile", "n/a")
    (fit,) = [line for line in lines_of(make_profile()) if line.startswith("Fit: ")]
    assert fit.count("95 % interval") == 2


def last_table(profile):
    table = inference_section(profile).tables[1]
    return table.headers, [row.texts for row in table.rows]


def test_the_table_of_timings_says_what_is_missing():
    titles, rows = last_table(make_profile(quantile=0.99))
    assert len(rows[0]) == len(titles)
    assert rows[0][:3] == ("compiled", "float32", "1")
    assert rows[0][5] == "needs 179 more"
    assert last_table(make_profile(make_timing(8, path="predict")))[1][0][5] == "n/a (bulk)"
    # The copy to a GPU has a column of its own where there was one.
    assert "Copy (ms)" not in titles
    titles, rows = last_table(make_profile(make_timing(1, copy_s=0.002), make_timing(8)))
    assert (titles[-1], [row[-1] for row in rows]) == ("Copy (ms)", ["2.00", "n/a"])
