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

from kbatch.records.fit_time import FitTime
from kbatch.records.pilot import PilotStretch
from kbatch.reporting.recommendation_text import answer_line, recommendation_text

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
        "0.002. Gradient noise binds: "
    )
    assert "at 256 it would make 1.28 times the samples/s, each worth 0.715 of one at" in flat(
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
            "binds: the data are few, and each epoch takes 100 ms to start and end",
        ),
        (
            {
                "noise_scale": 2000.0,
                "timings": make_timings(300, fits=32),
                "memory": make_memory(40),
            },
            "Memory binds: with more of it more examples would fit",
        ),
        ({"pilot": make_pilot(scatter=30.0)}, "Which limit binds cannot be told: hardware"),
    ],
)
def test_the_limit_that_binds_is_named(changed, words):
    assert words in flat(make_recommendation(**changed))


def test_every_limit_has_its_line():
    text = flat(make_recommendation())
    for words in (
        "Memory allows at least 1,437 examples at once, 4.00 GiB of 8.00 GiB (reached the data",
        "The device saturates at 900 examples at once",
        "Beyond 190 examples (190 to 200), the gradient noise scale, more than half",
        "Measured in a pilot of 1,000 updates at batch size 32.",
        "The input pipeline delivers 1,000,000 samples/s (",
        "In `fit` an update of 256 takes 3.6 ms for the train step, 0 ms for data to come",
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


def test_an_unresolved_noise_scale_says_what_to_do():
    text = flat(make_recommendation(pilot=make_pilot(scatter=30.0, ended_by="budget")))
    assert text.startswith("The batch size cannot be told, because the gradient noise scale is")
    assert "a larger `budget_s` gives a longer pilot" in text
    counted = answer_line(make_recommendation(pilot=make_pilot(scatter=30.0, ended_by="epochs")))
    assert "unresolved: more `epochs` give a longer pilot" in counted
    settled = answer_line(make_recommendation(pilot=make_pilot(scatter=30.0)))
    assert "unresolved, though the pilot went on until its loss no longer fell" in settled
    assert "keep batch size 32" in text
    assert "Gradient noise: cannot tell, because the noise scale is unresolved" in text
    refused = make_recommendation(pilot=None, unknown={"gradient noise": "the data are too few"})
    assert answer_line(refused).startswith("The batch size cannot be told, because the data are")


def test_a_pilot_whose_loss_became_nan_says_what_to_look_at():
    stretch = PilotStretch(3, None, None, None, None)
    pilot = make_pilot(ended_by="diverged", stretches=0)
    pilot = dataclasses.replace(pilot, stretches=(stretch,))
    # Epochs that cost much make the smallest size the best one at any noise scale.
    slow = make_fit_times(epoch_s=10.0)
    found = make_recommendation(pilot=pilot, fit_times=slow)
    assert (found.batch_size, found.learning_rate) == (None, None)
    assert make_recommendation(pilot=None, fit_times=slow).batch_size is not None
    text = flat(found)
    words = "because the pilot's loss became NaN within 3 updates: look for values in the data"
    assert text.startswith(f"The batch size cannot be told, {words}")
    assert f"Gradient noise: cannot tell, {words}" in text
    assert "98 % of its way" not in text
    assert "keep batch size" not in text
    assert "lost in its noise" not in text


def test_the_table_compares_other_sizes():
    rows = recommendation_text(make_recommendation()).splitlines()
    head = next(i for i, row in enumerate(rows) if row.split()[:2] == ["batch", "micro-batch"])
    sizes = [row.split()[0] for row in rows[head + 1 : head + 6]]
    assert sizes == ["32", "64", "128", "256", "512"]
    (best,) = [row for row in rows if row.endswith("<")]
    assert best.split()[0] == "128"
    assert best.split()[-2] == "1"
    assert "would cost, to held-out loss 0.241 batch" in flat(make_recommendation())
    trained = make_recommendation(pilot=make_pilot(held_out=False))
    assert "would cost, to training loss 0.141 batch" in flat(trained)


def test_other_micro_batches_and_learning_rates_are_weighed():
    text = flat(make_recommendation())
    assert "Micro-batch size 64: less memory, 0.695 times the samples/s of 128." in text
    assert "half of it would need 1.33 times the updates" in text


def test_accumulation_that_buys_nothing_is_said_to():
    assert "Accumulation buys nothing on one device here" in flat(make_recommendation())
    # Parts that run twice as fast as the whole.
    timings = tuple(
        dataclasses.replace(t, durations_s=tuple(s / 3 for s in t.durations_s))
        if t.micro_batch_size < t.batch_size
        else t
        for t in make_timings(100, fits=64)
    )
    faster = make_recommendation(timings=timings, noise_scale=2000.0)
    assert faster.micro_batch_size < faster.batch_size
    assert "Accumulation makes the way" in flat(faster)
    assert f"({faster.batch_size // 64} to an update)" in flat(faster)
    # Epochs that were slow when they were timed are so for whole batches alone.
    slow = [(32, 0.00132), (256, 0.00356)]
    fits = tuple(
        FitTime(size, (0.009 + s,) * 3, (0.010 + s,) * 3, (0.0,) * 3, None) for size, s in slow
    )
    odd = make_recommendation(noise_scale=50.0, fit_times=fits)
    assert odd.micro_batch_size == odd.batch_size
    assert "Accumulation buys nothing" in flat(odd)
    beyond = tuple(
        dataclasses.replace(t, durations_s=tuple(s / 20 for s in t.durations_s))
        if (t.batch_size, t.micro_batch_size) == (1024, 64)
        else t
        for t in make_timings(100)
    )
    untrained = make_recommendation(timings=beyond, checks=(make_check(64, 300),))
    assert untrained.micro_batch_size == untrained.batch_size <= 64
    assert "Accumulation" not in flat(untrained)
    untimed = make_recommendation(timings=make_timings()[:4])
    assert "Accumulation" not in flat(untimed)


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
        (
            {"timings": make_timings(sizes=(64, 128)), "noise_scale": 20.0},
            "suit batch size 32, and is left as it is: it goes no further than the noise scale.",
        ),
        ({"base_batch_size": 128}, "suit batch size 128, and is left as it is."),
        ({"n_half": 800, "noise_scale": 50}, "times), and no further than the noise scale."),
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
        "not in 900 updates at 512. One run a size",
        "No further one: time was short.",
        "by the updates that the trained sizes needed. The gradient noise scale of the pilot is",
        "Sizes from 64 to 128 may be as good. Gradient noise binds",
        "nothing was trained at this size. To check it, train at 32, 64 and 128",
    ):
        assert words in text
    near = flat(make_recommendation(n_half=800.0, checks=(make_check(64, 300),)))
    assert "Larger sizes may be faster; they were not trained." in near
    assert "Larger sizes may be" not in text
    broken = flat(make_recommendation(checks=(make_check(256, 4, "diverged"),)))
    assert "525 updates at 32 and not at 256, where the loss became NaN" in broken
    none = flat(make_recommendation())
    assert "was trained. None of the others was likely to be more than 5 % faster." in none
    base = make_recommendation(n_half=8.0, noise_scale=100.0)
    assert base.batch_size == 32
    assert "The page is a model's. To check it, train at 16, 32 and 64" in flat(base)
    alone = flat(make_recommendation(unknown={"other batch sizes": "time was short"}))
    assert "No size but the pilot's was trained. No further one: time was short." in alone


def test_one_size_is_compared_with_no_other():
    alone = make_recommendation(timings=make_timings(sizes=(32, 64))[:1], noise_scale=40.0)
    text = flat(alone)
    assert alone.batch_size == 32
    assert "saturation: cannot tell, because it takes two sizes that go through whole" in text
    assert "No other size was timed." in text
    assert "best size at every noise scale" not in text


def test_doubts_and_checks_are_told():
    text = flat(make_recommendation())
    assert "under Adam is disputed: Merrill et al. (2025, arXiv:2505.23971)" in text
    assert "Merrill" not in flat(make_recommendation(optimizer="SGD"))
    assert "nothing was trained at this size. To check it, train at 64, 128 and 256" in text
    assert "It is the best size at every noise scale in its interval." in text
    wide = flat(make_recommendation(pilot=make_pilot(200.0, scatter=1.5, stretches=80)))
    assert "At the ends of the noise scale's interval" in wide
    assert "this size takes at most" in wide
    end = flat(make_recommendation(n_half=4000, noise_scale=5000))
    assert "It is the largest size that was timed: one beyond it may be better." in end
    ended = flat(make_recommendation(pilot=make_pilot(ended_by="budget")))
    assert "ended with its budget, while it still came on." in ended
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
