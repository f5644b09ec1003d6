import dataclasses

import pytest
from input_profile_factory import (
    make_long_run,
    make_profile,
    make_rate,
    make_remedy,
    make_smaller_steps,
)

from kbatch.input_pipeline.record import CostRecord, RateRecord, SmallerStepRecord
from kbatch.input_pipeline.report import input_section


def text(profile):
    section = input_section(profile)
    return "\n".join((section.headline, *section.details, *(note.text for note in section.notes)))


def test_the_verdict_comes_first_with_its_evidence():
    lines = text(make_profile()).splitlines()
    assert lines[0].startswith("Input-bound: training waits for data; a larger batch helps only as")
    assert lines[1].startswith("Pipeline alone: 800 samples/s (7")
    assert lines[2].startswith("Train step alone, batch size 64: 2,400 samples/s (2,3")
    assert "66 % of each step is spent waiting" in lines[3]
    assert lines[-1] == "5 of 9 rounds were made."


def with_rates(profile=None, **rates):
    return dataclasses.replace(profile or make_profile(), **rates)


def all_sides(rate, **changed):
    return with_rates(pipeline=rate, step=rate, together=rate, **changed)


UNEVEN = RateRecord((100,) * 4, (0.1, 0.2, 0.1, 0.25))
CHUNKS = make_profile(pipeline=2400, step=800, long_run=make_long_run(400, waiting=0.6))
ONE_CHUNK = make_profile(pipeline=2400, step=800, long_run=make_long_run(400, 2400, waiting=0.6))
BUSY = {"pipeline": make_rate(800, cores=8.0), "step": make_rate(2400, cores=6.0)}
BENT = (make_smaller_steps()[0], SmallerStepRecord(4, make_rate(1200)))
COSTS = (CostRecord("slicing rows in order", (1e-3, 1.1e-3, 0.9e-3)),)


def crossed(pipeline, overhead_examples):
    steps = make_smaller_steps(overhead_examples=overhead_examples)
    return make_profile(pipeline=pipeline, smaller_steps=steps)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (make_profile(pipeline=2400, step=800, wait_share=0.02), "keeps up with the"),
        (make_profile(pipeline=2400, step=800, wait_share=0.3), "does not overlap with the step"),
        (make_profile(pipeline=1000, step=1000), "equally fast within 5 %"),
        (make_profile(together=400), "hold each other up, and not for want"),
        (make_profile(), "side by side it would be 800, one after the other 600"),
        (with_rates(make_profile(together=400), **BUSY), "want the same cores"),
        # A long reading that differs from the rounds.
        (
            make_profile(pipeline=2700, step=2400, long_run=make_long_run(2200)),
            "in the rounds and 0.917 over one long reading, on the other side of 1",
        ),
        (CHUNKS, "(whole chunks with the pauses between them)"),
        (CHUNKS, "60 % of each step"),
        (ONE_CHUNK, "Note that one reading of 3.00 s gave 400 to 2,400 samples/s, 0.5"),
        (ONE_CHUNK, "Undetermined: the batches come unevenly"),
        (ONE_CHUNK, "whether such a pause comes again was not seen"),
        # Too little to tell.
        (
            with_rates(pipeline=UNEVEN, step=make_rate(700, rounds=4), together=UNEVEN),
            "which does not tell them apart",
        ),
        (all_sides(make_rate(700, rounds=2), smaller_steps=()), "too few rounds"),
        # The batch size at which both take as long.
        (crossed(800, 16), "size 6 (6 to 6) the step is slower, above it the pipeline, if"),
        (crossed(800, 0.001), "The pipeline is the slower one at every batch size."),
        (crossed(9000, 16), "keeps up at every batch size"),
        (crossed(4800, 100), "(far from the sizes 4 to 64 that were measured)"),
        (make_profile(pipeline=3010), "cannot be told from these rounds"),
        (make_profile(smaller_steps=BENT), "not linear in the batch size: it is off the line by"),
        # What was measured beside the rates.
        (make_profile(), "by this process, of 16: pipeline 1.5, step 1.5 and together 1.5"),
        (
            with_rates(step=dataclasses.replace(make_rate(800), gpu_busy_share=0.5)),
            "GPU busy: step 50 %.",
        ),
        (make_profile(costs=COSTS), "Slicing rows in order: 1.00 ms a batch (0.7"),
    ],
)
def test_what_the_rates_mean_is_said(profile, words):
    assert words in text(profile)


def test_what_is_not_so_is_not_said():
    assert "Note that one reading" not in text(make_profile(long_run=make_long_run(800)))
    assert "not linear" not in text(make_profile())
    assert "kept busy by" not in text(all_sides(make_rate(800, cores=None)))


def test_remedies_stand_best_first_and_only_clear_gains_are_claimed():
    remedies = (
        make_remedy("prefetch", 1.0),
        make_remedy("any order", 0.7),
        make_remedy("parallel map", 1.9, condition="the function is called from several threads"),
        make_remedy("cache", 2.5),
        make_remedy("thread pool", 1.04),
    )
    tried, untried = input_section(make_profile(remedies=remedies)).tables
    assert [row.texts[:2] for row in tried.rows] == [
        ("cache", "2.50"),
        ("parallel map", "1.90"),
        ("thread pool", "1.04 (no clear gain)"),
        ("prefetch", "1.00 (no clear gain)"),
        ("any order", "0.700 (slower)"),
    ]
    assert [row.best for row in tried.rows] == [True] + [False] * 4
    assert tried.rows[0].texts[3] == "code of cache"
    assert tried.rows[1].texts[4] == "the function is called from several threads"
    assert untried.rows[0].texts == ("any order", "code of any order", "no parallel stage")
    assert input_section(make_profile(remedies=())).tables == (untried,)


def test_an_impossible_order_of_rates_is_the_reason_for_no_verdict():
    profile = make_profile(pipeline=50_000, step=2550, together=9610)
    found = text(profile)
    assert found.startswith(
        "Undetermined: both together ran at 9,610 samples/s, faster than the train step alone "
        "(2,550). That cannot be"
    )
    assert "side by side" not in found and "batch size 1" not in found
    assert input_section(profile).lead == (
        "The ratio of the rates is not known: what was timed alone was disturbed.",
    )
