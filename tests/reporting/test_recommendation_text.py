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
    "pipelines": (),
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


def test_what_cannot_be_told_has_its_reason():
    text = flat(make_recommendation(**NOTHING))
    assert text.startswith("No size can be recommended, because no time was left.")
    for limit, reason in REASONS.items():
        assert f"{limit.capitalize()}: cannot tell, because {reason}." in text
    assert "How sure" not in text
    assert "What another choice" not in text


def test_an_unresolved_noise_scale_says_what_to_do():
    text = flat(make_recommendation(pilot=make_pilot(scatter=30.0)))
    assert text.startswith("The batch size cannot be told, because the gradient noise scale is")
    assert "a larger `budget_s` gives a longer pilot" in text
    assert "keep batch size 32" in text
    assert "Gradient noise: cannot tell, because the noise scale is unresolved" in text
    refused = make_recommendation(pilot=None, unknown={"gradient noise": "the data are too few"})
    assert answer_line(refused).startswith("The batch size cannot be told, because the data are")


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
        ({"learning_rate_rule": None}, "suit batch size 32, and is left as it is."),
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
    alone = flat(make_recommendation(unknown={"other batch sizes": "time was short"}))
    assert "No size but the pilot's was trained. No further one: time was short." in alone


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
    assert words in flat(make_recommendation(pipelines=(bursts,)))
    assert "long reading" not in flat(make_recommendation())
