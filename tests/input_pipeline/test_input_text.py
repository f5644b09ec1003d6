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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pipeline": 2400, "step": 800, "wait_share": 0.02}, "the pipeline keeps up with the"),
        ({"pipeline": 2400, "step": 800, "wait_share": 0.3}, "does not overlap with the step"),
        ({"pipeline": 1000, "step": 1000}, "equally fast within 5 %"),
        ({"pipeline": 800, "step": 2400, "together": 400}, "hold each other up, and not for want"),
        ({"pipeline": 800, "step": 2400}, "side by side it would be 800, one after the other 600"),
    ],
)
def test_what_the_rates_mean_is_said(changed, words):
    assert words in text(make_profile(**changed))


def test_cores_are_wanted_only_where_both_sides_keep_them_busy():
    profile = make_profile(pipeline=800, step=2400, together=400)
    busy = {"pipeline": make_rate(800, cores=8.0), "step": make_rate(2400, cores=6.0)}
    assert "want the same cores" in text(dataclasses.replace(profile, **busy))


def test_rounds_and_a_long_reading_on_different_sides_are_told():
    profile = make_profile(pipeline=2700, step=2400, long_run=make_long_run(2200))
    assert profile.verdict == "undetermined"
    assert "in the rounds and 0.917 over one long reading, on the other side of 1" in text(profile)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((400,), "(whole chunks with the pauses between them)"),
        ((400, 2400), "Note that one reading of 3.00 s gave 400 to 2,400 samples/s, 0.5"),
        ((400, 2400), "Undetermined: the batches come unevenly"),
        ((400, 2400), "whether such a pause comes again was not seen"),
    ],
)
def test_a_long_reading_that_differs_is_told(bounds, words):
    long_run = make_long_run(*bounds, waiting=0.6)
    found = text(make_profile(pipeline=2400, step=800, long_run=long_run))
    assert words in found
    assert "60 % of each step" in found
    assert "Note that one reading" not in text(make_profile(long_run=make_long_run(800)))


def test_an_interval_around_one_and_too_few_rounds_ask_for_more():
    uneven = RateRecord((100,) * 4, (0.1, 0.2, 0.1, 0.25))
    profile = dataclasses.replace(
        make_profile(), pipeline=uneven, step=make_rate(700, rounds=4), together=uneven
    )
    profile = dataclasses.replace(profile, smaller_steps=())
    assert profile.verdict == "undetermined"
    assert "which does not tell them apart" in text(profile)
    few = [make_rate(700, rounds=2)] * 3
    profile = dataclasses.replace(
        profile, **dict(zip(("pipeline", "step", "together"), few, strict=True))
    )
    assert "too few rounds" in text(profile)


@pytest.mark.parametrize(
    ("overhead_examples", "pipeline", "words"),
    [
        (
            16,
            800,
            "size 6 (6 to 6) the step is slower, above it the pipeline, if",
        ),
        (0.001, 800, "The pipeline is the slower one at every batch size."),
        (16, 9000, "keeps up at every batch size"),
        (100, 4800, "(far from the sizes 4 to 64 that were measured)"),
    ],
)
def test_the_crossing_is_put_in_words(overhead_examples, pipeline, words):
    smaller = make_smaller_steps(overhead_examples=overhead_examples)
    assert words in text(make_profile(pipeline=pipeline, smaller_steps=smaller))


def test_what_the_rounds_do_not_tell_of_the_crossing_is_said():
    assert "cannot be told from these rounds" in text(make_profile(pipeline=3010))
    line, _ = make_smaller_steps()
    bent = (line, SmallerStepRecord(4, make_rate(1200)))
    found = text(make_profile(smaller_steps=bent))
    assert "not linear in the batch size: it is off the line by up to" in found
    assert "not linear" not in text(make_profile())


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


def test_processor_gpu_and_costs_are_told_where_they_were_measured():
    assert (
        "Cores kept busy by this process, of 16: pipeline 1.5, step 1.5 and together 1.5"
        in text(make_profile())
    )
    silent = make_rate(800, cores=None)
    none = make_profile()
    none = dataclasses.replace(none, pipeline=silent, step=silent, together=silent)
    assert "kept busy by" not in text(none)
    busy = dataclasses.replace(make_rate(800), gpu_busy_share=0.5)
    assert "GPU busy: step 50 %." in text(dataclasses.replace(make_profile(), step=busy))
    costs = (CostRecord("slicing rows in order", (1e-3, 1.1e-3, 0.9e-3)),)
    assert "Slicing rows in order: 1.00 ms a batch (0.7" in text(make_profile(costs=costs))


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
