import dataclasses

import pytest
from input_profile_factory import make_long_run, make_profile
from recommendation_factory import (
    make_check,
    make_fit_times,
    make_memory,
    make_pilot,
    make_recommendation,
    make_timings,
)

from kbatch.recommendation.pilot_record import PilotStretch
from kbatch.recommendation.report import answer_line, recommendation_text

REASONS = {
    "memory": "the device does not tell",
    "hardware saturation": "no time was left",
    "gradient noise": "the data hold one batch",
    "input pipeline": "the data can be read once",
}
NOTHING = {
    "timings": (),
    "memory": None,
    "pilot": None,
    "pipeline": None,
    "fit_times": (),
    "unknown": REASONS,
}


def flat(recommendation):
    return " ".join(recommendation_text(recommendation).split())


def test_the_first_line_is_the_answer():
    found = make_recommendation()
    assert flat(found).startswith(
        "Use batch size 128, micro-batch size 128 (the whole batch at once) and learning rate "
        "0.002. 64 and 256 may be as good. Gradient noise binds: "
    )
    assert "at 256 it would make 1.28 times the samples/s, each worth 0.719 of one at" in flat(
        found
    )
    assert str(found) == recommendation_text(found)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_half": 8, "noise_scale": 900}, "Hardware saturation binds: the device is nearly"),
        ({"n_half": 800, "noise_scale": 40}, "Gradient noise binds: the device would run faster"),
        ({"input_rate": 5_000.0}, "The input pipeline binds: the device waits for data"),
        (
            {"noise_scale": 2000.0, "fit_times": make_fit_times(epoch_s=0.1)},
            "binds: the data set is small, and each epoch takes 100 ms to start and end",
        ),
        (
            {
                "noise_scale": 2000.0,
                "timings": make_timings(300, fits=32),
                "memory": make_memory(40),
            },
            "Memory binds: with more of it more examples would fit",
        ),
        (
            {"pilot": make_pilot(scatter=30.0), "checks": ()},
            "Which limit binds is not clear: hardware",
        ),
    ],
)
def test_the_limit_that_binds_is_named(changed, words):
    assert words in flat(make_recommendation(**changed))


def test_every_limit_has_its_line():
    text = flat(make_recommendation(checks=()))
    for words in (
        "Memory allows at least 1,437 examples at once, 4.00 GiB of 8.00 GiB (reached the data",
        "The device saturates at 900 examples at once",
        "Beyond 190 examples (180 to 200), the gradient noise scale, more than half",
        "Measured in a pilot of 1,000 updates at batch size 32.",
        "The input pipeline delivers 1,000,000 samples/s (",
        "In `fit` an update of 256 takes 3.6 ms for the train step, 0 ms waiting for data",
    ):
        assert words in text


def test_the_end_of_the_search_in_memory_is_told_without_its_arguments():
    memory = dataclasses.replace(make_memory(2048), reason="reached `max_batch_size`")
    text = flat(make_recommendation(memory=memory))
    assert "4.00 GiB of 8.00 GiB (reached the largest batch size that was tried)." in text


def test_what_cannot_be_told_has_its_reason():
    text = flat(make_recommendation(**NOTHING))
    assert text.startswith("No size can be recommended, because no time was left.")
    for limit, reason in REASONS.items():
        assert f"{limit.capitalize()}: cannot tell, because {reason}." in text
    assert "How sure" not in text
    assert "What another choice" not in text


def test_a_pilot_that_compares_no_sizes_says_what_to_do():
    few = make_pilot(stretches=0, ended_by="budget")
    stretches = tuple(PilotStretch(1, 2.0, 2.0 - 0.1 * i, 1.0, 1.0) for i in range(9))
    text = flat(make_recommendation(pilot=dataclasses.replace(few, stretches=stretches)))
    assert text.startswith(
        "No batch size can be named yet, because the pilot reached its loss after 9 of its 9 "
        "updates, too few to compare sizes: a larger `budget_s` gives a longer pilot."
    )
    assert "keep batch size 32" in text
    assert "What the trained sizes cost" not in text
    flat_loss = tuple(PilotStretch(5, 2.0, 2.0 + i % 2, 1.0, 1.0) for i in range(20))
    still = dataclasses.replace(few, stretches=flat_loss, ended_by="epochs")
    words = answer_line(make_recommendation(pilot=still))
    assert "fell by no more than its scatter in 100 updates: more `epochs` give" in words
    refused = make_recommendation(pilot=None, unknown={"gradient noise": "the data are too few"})
    assert answer_line(refused).startswith("No batch size can be named yet, because the data are")
    vague = flat(make_recommendation(pilot=make_pilot(scatter=30.0), checks=()))
    assert vague.startswith("Keep batch size 32")
    assert "Gradient noise: cannot tell, because the noise scale is unresolved" in vague


def test_a_pilot_whose_loss_became_nan_says_what_to_look_at():
    stretch = PilotStretch(3, None, None, None, None)
    pilot = make_pilot(ended_by="diverged", stretches=0)
    pilot = dataclasses.replace(pilot, stretches=(stretch,))
    found = make_recommendation(pilot=pilot)
    assert (found.batch_size, found.learning_rate) == (None, None)
    text = flat(found)
    words = "because the pilot's loss became NaN within 3 updates: look for values in the data"
    assert text.startswith(f"No batch size can be named yet, {words}")
    assert f"Gradient noise: cannot tell, {words}" in text
    assert "% of its progress" not in text
    assert "keep batch size" not in text
    assert "lost in its noise" not in text


def table(recommendation):
    """The rows of the table by their batch size."""
    lines = recommendation_text(recommendation).splitlines()
    head = next(i for i, row in enumerate(lines) if row.split()[:2] == ["batch", "micro-batch"])
    ends = next(i for i, row in enumerate(lines) if i > head and row.startswith("  Learning"))
    rows = [row for row in lines[head + 1 : ends] if not row.lstrip().startswith("Micro")]
    return {row.split()[0]: row for row in rows if row.split()[0].replace(",", "").isdigit()}


def test_the_table_compares_the_sizes_that_were_trained():
    checks = (make_check(128, 200), make_check(512, 900, "lost"), make_check(1024, 3, "diverged"))
    rows = table(make_recommendation(n_half=800.0, checks=checks))
    assert list(rows) == ["32", "128", "512", "1,024"]
    assert rows["512"].count("> ") == 3
    assert rows["512"].split()[4] == "900"
    assert rows["1,024"].split()[-1] == "failed"
    (best,) = [row for row in rows.values() if row.endswith("<")]
    assert best.split()[0] == "128"
    assert best.split()[-2] == "1"
    assert "sizes cost, to held-out loss 0.241 batch" in flat(make_recommendation())
    trained = make_recommendation(pilot=make_pilot(held_out=False))
    assert "sizes cost, to training loss 0.141 batch" in flat(trained)
    alone = table(make_recommendation(checks=()))
    assert list(alone) == ["32"]


def test_a_page_names_the_best_of_its_table_and_the_rest_as_not_trained():
    """On the digits: 32 was recommended beside a row in which 128 took 0.62 times as long."""
    checks = (make_check(256, 132, "budget"),)
    found = make_recommendation(n_half=800.0, checks=checks, short_s={128: 3.0, 64: 2.0})
    assert flat(found).startswith("Keep batch size 32, ")
    assert list(table(found)) == ["32", "256"]
    untested = {one.batch_size: one for one in found.decision.untested}
    assert {64, 128, 256} <= untested.keys()
    assert untested[128].most_speedup > untested[128].speedup > 1
    text = flat(found)
    assert "Batch size 256 was cut short and may be up to" in text
    assert "Batch size 128 was not trained and may be up to" in text
    assert "times expected): give `budget_s=80` to train it to the loss." in text


def test_the_answer_of_an_older_file_is_marked_and_compares_nothing():
    text = flat(make_recommendation(older=True))
    assert text.startswith(
        "The version of kbatch that wrote this file answered: Use batch size 128, "
    )
    assert "What the trained sizes cost" not in text
    assert "likely to be more than 5 % faster" not in text


def test_parts_and_other_learning_rates_are_said():
    timings = tuple(
        dataclasses.replace(t, durations_s=tuple(s / 3 for s in t.durations_s))
        if t.micro_batch_size < t.batch_size
        else t
        for t in make_timings(100, fits=64)
    )
    found = make_recommendation(timings=timings, noise_scale=2000.0)
    assert found.micro_batch_size < found.batch_size
    text = flat(found)
    assert f"({found.batch_size // 64} to an update)" in text
    assert "halving it needs 1.33 times the updates" in text


def test_of_arrays_fit_alone_shows_the_input():
    found = make_recommendation(pipeline=None)
    assert "In `fit` an update of 256 takes" in flat(found)
    assert "Input pipeline: cannot tell" not in flat(found)
    assert "Input pipeline: cannot tell" in flat(make_recommendation(pipeline=None, fit_times=()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "suit batch size 32; for Adam it grows with its square root (2 times)."),
        (
            {"learning_rate_rule": "linear", "optimizer": "SGD"},
            "grows in proportion to it (4 times)",
        ),
        ({"base_batch_size": 512}, "for Adam it shrinks with its square root (0.5 times)."),
        ({"learning_rate_rule": None}, "suit batch size 32, and is left as it is."),
        ({"base_batch_size": 128}, "suit batch size 128, and is left as it is."),
        ({"scheduled": True}, "the learning-rate schedule with its rates times 2 and its steps"),
        ({"base_learning_rate": None}, "and 2 times the learning rate."),
    ],
)
def test_the_learning_rate_and_its_rule_are_told(changed, words):
    assert words in flat(make_recommendation(**changed))


def test_trained_sizes_are_told():
    checks = (make_check(128, 260), make_check(512, 900, "lost"))
    text = flat(make_recommendation(checks=checks, unknown={"other batch sizes": "time was short"}))
    for words in (
        "to the pilot's held-out loss, 0.241: 525 updates at 32, 260 updates at 128 and not in",
        "not in 900 updates at 512. Another seed",
        "No further one: time was short.",
        "judging by the updates that the trained sizes needed. The gradient noise scale of",
        "This rests on few short runs of each size. To check it, train at",
    ):
        assert words in text
    again = (*checks, make_check(128, 310), make_check(128, 400, "lost"))
    assert "260 and 310 updates at 128, not in 400 updates at 128 and not in 900" in flat(
        make_recommendation(checks=again)
    )
    broken = flat(make_recommendation(checks=(make_check(256, 4, "diverged"),)))
    assert "525 updates at 32 and not at 256, where the loss became NaN" in broken
    failed = flat(make_recommendation(checks=(make_check(256, 0, "failed"),)))
    assert "525 updates at 32 and not at 256, which failed" in failed
    settled = flat(make_recommendation())
    assert "No other size that was timed is likely to be more than 5 % faster." in settled
    alone = flat(make_recommendation(checks=(), unknown={"other batch sizes": "time was short"}))
    assert "No size but the pilot's was trained. No further one: time was short." in alone
    assert "is likely to be more than 5 % faster." not in alone


def test_one_size_is_compared_with_no_other():
    alone = make_recommendation(timings=make_timings(sizes=(32, 64))[:1])
    text = flat(alone)
    assert alone.batch_size == 32
    assert "saturation: cannot tell, because it takes two sizes that go through whole" in text
    assert "No other size was timed." in text


def test_doubts_and_checks_are_told():
    text = flat(make_recommendation())
    assert "under Adam is disputed: Merrill et al. (2025, arXiv:2505.23971)" in text
    assert "Merrill" not in flat(make_recommendation(optimizer="SGD"))
    assert "few short runs of each size. To check it, train at 64, 128 and 256" in text
    end = flat(make_recommendation(n_half=4000, noise_scale=5000))
    assert "It is the largest size that was timed: one beyond it may be better." in end
    ended = flat(make_recommendation(pilot=make_pilot(ended_by="budget")))
    assert "ended when its budget was spent, while its loss was still falling." in ended
    assert "Note: a note" in flat(make_recommendation(notes=("a note",)))


def test_prose_fits_a_page():
    for line in recommendation_text(make_recommendation()).splitlines():
        assert len(line) <= 100


def test_pauses_of_the_pipeline_are_told():
    bursts = make_profile(
        batch_size=256, pipeline=1e6, step=50_000, long_run=make_long_run(8_000, 20_000)
    )
    words = "A long reading gave 8,000 to 20,000 samples/s, with its pauses."
    assert words in flat(make_recommendation(pipeline=bursts))
    assert "long reading" not in flat(make_recommendation())
