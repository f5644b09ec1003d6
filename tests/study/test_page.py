"""The page of a decision: what it says, and that it does not contradict itself."""

import dataclasses
import html
import math

import numpy as np
import pytest
from figure_samples import words
from records_factory import make_diverged, make_epochs, make_execution, make_search, make_study
from records_factory import make_trial as trial_of

import kbatch
from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS, LearningRateScaling
from kbatch.records.training_run import Outcomes
from kbatch.study.figures.quality import learning_curves, pareto_points
from kbatch.study.figures.trials import named_label
from kbatch.study.page import with_page

BEGINS = ("initial_weights", "first_order")


def make_trial(size, errors, *, rate=1000.0, factor=None, scatter=8, epochs=1, count=3, **changed):
    """A trial of three executions wrong on so many of 20,000 validation examples."""
    runs = []
    ratio = (factor or 1.0) * (size / 32) ** 0.5
    betas = {"given": {"beta_2": (0.999,)}, "made": {"beta_2": (0.999 ** (size / 32),)}}
    scaling = LearningRateScaling("sqrt", size, 32, ratio, 0.001 * ratio, ("beta_2",), **betas)
    for seed in range(count):
        wrong = np.random.default_rng((size, seed)).choice(20_000, scatter, replace=False)
        values = np.ones(20_000)
        values[:: 20_000 // errors] = 0
        values[wrong] = 0
        blocks = tuple(values.reshape(50, 400).mean(1).tolist())
        shown = {"metric": "val_accuracy", "examples": 20_000, "block_examples": 400}
        value = float(values.mean())
        run = make_execution(
            size,
            rate=rate,
            seed=seed,
            scaling=scaling,
            outcomes=Outcomes(values=blocks, key="k", **shown),
            epochs=make_epochs([value - 0.02 * k for k in reversed(range(epochs))]),
            **changed,
        )
        runs.append(run)
    values = {} if factor is None else {FACTOR_NAME: factor}
    return trial_of(size, *runs, hyperparameters=values, trial_id=f"{size}-{factor}")


def pages(*trials, **settings):
    search = make_search(**({"base_batch_size": 32} | settings))
    return make_study(*trials, search=search).decide()


def outcomes(found):
    return [row["outcome"] for row in found.page.rows]


def certain(**changed):
    return pages(
        make_trial(32, 800, rate=1000.0),
        make_trial(64, 800, rate=2000.0, **changed),
        make_trial(128, 800, rate=2060.0),
        make_trial(256, 2000, rate=4000.0, micro_batch_size=200),
    )


def test_use_of_a_custom_fit_names_it_and_no_recipe():
    found = certain(plan=None)
    assert "HyperModel's `fit` with `batch_size=64`" in found.page.use
    assert "apply" not in found.page.use


def test_the_smallest_of_those_about_as_fast_is_taken_and_the_page_shows_all():
    found = certain(steps_per_execution=8)
    assert (found.batch_size, found.certain) == (64, True)
    assert (found.best.batch_size, found.tied, found.worse) == (128, (32, 64, 128), (256,))
    page = found.page
    assert page.headline.startswith("Take batch size 64 with learning rate 0.00141, for 1 epoch")
    assert page.certainty.code == "certain"
    assert page.change == (
        "32 -> 64: 2.0 times sooner (2.0 to 2.0), validation accuracy as good within 0.01."
    )
    # The only ratio of times: the rows have samples/s.
    assert [row["samples/s"] for row in page.rows] == pytest.approx([1000, 2000, 2060, 4000])
    assert str(found).count("times") == 1
    assert [row["batch size"] for row in page.rows] == [32, 64, 128, 256]
    assert outcomes(found) == ["as good", "take", "as good", "worse"]
    assert "decision.apply(build())`" in page.use and "(x, y, 64), epochs=1)" in page.use
    assert "callbacks" not in page.use
    assert "`steps_per_execution` 8" in page.use
    assert "`beta_2` 0.999 -> 0.998" in page.use
    assert "Batches of up to 128 went through whole" in page.use
    assert page.search == "12 trainings of 4 batch sizes."
    assert page.certainty in found.notes
    assert str(found).splitlines()[0] == page.headline
    assert len(str(found).splitlines()) <= 15
    assert found._repr_html_() == f"<pre>{html.escape(str(found))}</pre>"


def test_a_size_is_as_fast_by_the_whole_interval():
    for speedup, told in (
        ((1.02, 0.97, 1.04), "as fast"),
        ((0.98, 0.7, 1.5), "time not told apart (0.70 to 1.5)"),
        ((1.04, 1.02, 1.06), "1.04 times sooner (1.02 to 1.06)"),
        ((0.97, 0.93, 0.985), "1.03 times longer (1.02 to 1.08)"),
        ((1.4, 0.98, 2.0), "1.4 times sooner (0.98 to 2.0)"),
    ):
        found = dataclasses.replace(certain(), speedup=Estimate(*speedup))
        page = with_page(found, found.trials, {}, missing=0).page
        assert page.change.startswith(f"32 -> 64: {told}, ")


def test_what_build_gave_stands_beside_what_is_set():
    # At the base size too, where a race tried another rate.
    name = "weight_decay"
    decays = {"given": {name: (0.004,)}, "made": {name: (0.002,)}}
    scaling = LearningRateScaling("sqrt", 32, 32, 2.0, 0.02, (name,), **decays)
    found = make_study(trial_of(32, scaling=scaling)).decide()
    assert found.settings["weight_decay"] == pytest.approx(0.002)
    assert "`weight_decay` 0.004 -> 0.002" in found.page.use


def test_a_rate_that_nobody_checked_is_said_to_be_so():
    assert "0.001 at batch size 32, was not checked" in certain().page.rate
    trials = make_trial(32, 800), make_trial(64, 800)
    assert pages(*trials, search_learning_rate=False).page.rate == ""


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "4 times too small"),
        (0.25, "4 times too large"),
        (1.0, "the best one tried"),
        (FACTORS[-1], "at least "),
    ],
)
def test_a_search_of_rates_says_how_far_the_users_was_off(factor, words):
    found = pages(make_trial(32, 800, factor=factor), make_trial(64, 805, factor=1.0))
    assert f"Your learning rate, 0.001 at batch size 32, is {words}" in found.page.rate
    assert found.learning_rate == pytest.approx(0.001 * factor)
    assert FACTOR_NAME not in str(found)


def test_of_many_rates_each_size_has_one_line_and_those_not_compared_say_why():
    trials = [make_trial(32, 800, factor=2.0), make_trial(64, 805, factor=2.0)]
    trials += [make_trial(32, 950, factor=1.0, count=1), make_trial(64, 990, factor=1.0, count=1)]
    found = pages(*trials, make_diverged(128))
    assert [row["batch size"] for row in found.page.rows] == [32, 64, 128]
    table = make_study(*trials).table()
    assert [list(table[name]) for name in ("rates tried", "runs")] == [[2, 2], [3, 3]]
    assert list(table["learning rate"]) == pytest.approx([0.002, 0.002 * 2**0.5])
    assert outcomes(found) == ["take", "as good", "diverged"]
    other = dataclasses.replace(make_trial(128, 700), hyperparameters={"units": 8})
    mixed = pages(make_trial(32, 600), make_trial(64, 600, rate=3000.0), other)
    assert outcomes(mixed)[2] == "other settings"


def test_a_rate_that_lost_a_value_has_no_row_in_place_of_the_one_that_is_compared():
    lost = make_trial(64, 800, factor=4.0, count=4)
    nan = dataclasses.replace(lost.executions[1], epochs=make_epochs([math.nan]), outcomes=None)
    lost = dataclasses.replace(lost, executions=(*lost.executions[:3], nan))
    found = pages(
        make_trial(32, 800, factor=2.0), make_trial(64, 800, factor=2.0, rate=3000.0), lost
    )
    assert outcomes(found) == ["as good", "take"]


def test_batches_that_are_cut_need_accumulation():
    cut = pages(make_trial(32, 800), make_trial(64, 800, rate=3000.0, micro_batch_size=16))
    assert cut.settings["micro_batch_size"] == 16
    assert "micro-batches of 16" in cut.page.use
    assert "no accumulation" not in cut.page.use


@pytest.mark.parametrize(("epochs", "told"), [(1, False), (4, True)])
def test_a_value_that_still_rises_at_the_end_is_said_to_hold_for_this_length(epochs, told):
    found = pages(make_trial(32, 800, epochs=epochs), make_trial(64, 800, epochs=epochs))
    rising = [note.values for note in found.page.limits if note.code == "still_rising"]
    assert [(v["gain"], v["last"]) for v in rising] == [("0.020", "epoch")] * told


def test_successes_beside_a_failure_leave_its_rate_open():
    trials = make_trial(32, 800), make_trial(64, 800, rate=2000.0)
    near, far = pages(*trials, make_diverged(128)), pages(*trials, make_diverged(16))
    assert near.batch_size == far.batch_size == 64
    (note,) = [n for n in near.page.limits if n.code == "failure_rate"]
    assert (note.values["rate"], note.values["how"]) == ("63 %", "diverged")
    assert "failure_rate" not in [note.code for note in far.page.limits]


@pytest.mark.parametrize("seed", range(6))
def test_no_page_says_that_sizes_are_not_told_apart_and_that_one_is_worse(seed):
    rng = np.random.default_rng(seed)
    trials = [
        make_trial(
            size,
            int(rng.integers(700, 1100)),
            rate=float(rng.uniform(900, 3000)),
            scatter=int(rng.integers(4, 400)),
            count=int(rng.choice((1, 3))),
        )
        for size in (32, 64, 128)
    ]
    search = make_search(base_batch_size=32)
    study = make_study(*trials, search=search)
    assert study.decide() is study.decide()
    found, (row,) = study.decide(), study.table().attrs["answer"]
    # No page names another size.
    assert study.table()["batch size"][row] == found.batch_size
    assert f"batch size {found.batch_size} " in study.answer
    assert f"batch size {found.batch_size}" in named_label(study)
    assert ("not certified" in named_label(study)) != found.certified
    both = {32, found.batch_size} <= set(found.tied)
    assert ("%" in found.page.change) == (found.batch_size != 32 and not both)
    assert outcomes(found).count("worse") == len(set(found.worse) - {found.batch_size})
    assert (found.page.certainty.code == "certain") == found.certain


@pytest.mark.parametrize(
    ("same", "certain", "words"),
    [
        (("initial_weights", "first_order"), False, "one. 64 trains fastest of the sizes with"),
        (("initial_weights",), True, "same weights"),
        (("first_order",), True, "in one order"),
        ((), True, ""),
    ],
)
def test_what_does_not_change_with_the_seed_is_said(same, certain, words):
    trials = []
    for trial in (make_trial(32, 800), make_trial(64, 805, rate=2000.0)):
        own = ({n: "same" if n in same else str(seed) for n in BEGINS} for seed in range(3))
        pairs = zip(trial.executions, own, strict=True)
        runs = tuple(dataclasses.replace(run, **begins) for run, begins in pairs)
        trials.append(dataclasses.replace(trial, executions=runs))
    found = pages(*trials)
    assert found.certain == certain
    assert words in found.reason


def test_a_certified_size_names_those_that_may_be_preferred():
    trials = [make_trial(32, 800, factor=2.0), make_trial(64, 800, factor=2.0, rate=3000.0)]
    trials += [make_trial(128, 900, factor=2.0, rate=9000.0, count=1), make_diverged(512)]
    trials += [make_trial(256, 900, factor=0.25, rate=9000.0, count=1)]
    raced = pages(*trials, strategy="race", batch_sizes=[32, 64, 128, 256, 512], tolerance=0.02)
    assert (raced.certified, raced.certain) == (True, False)
    assert "128 was stopped early: unlikely to be the best size. 256 was tra" in raced.reason
    assert "512" not in raced.reason and "fewer `batch_sizes`" in raced.reason
    assert "a tolerance of" not in raced.reason


def test_the_table_and_the_figures_of_a_race_show_the_value_that_was_judged():
    trials = []
    for size in (32, 64):  # The first execution chose the pair, and was lucky.
        trial = make_trial(size, 800, factor=2.0, count=5)
        lucky = make_trial(size, 200, rate=9000.0, factor=2.0, count=1).executions[0]
        trials.append(dataclasses.replace(trial, executions=(lucky, *trial.executions[1:])))
    study = make_study(*trials, search=make_search(base_batch_size=32, strategy="race"))
    judged = study.table().set_index("batch size")["validation accuracy"]
    assert judged[64] == pytest.approx(np.mean(study.trials[1].judged_values[1:]))
    for panel, shown in zip(
        kbatch.plot_trials(study).figure.axes, (study.table()["samples/s"], judged), strict=True
    ):
        assert any(list(line.get_ydata()) == pytest.approx(list(shown)) for line in panel.lines)
        # The ring is around the point of the answer.
        (ring,) = [line for line in panel.lines if line.get_markersize() == 13]
        assert ring.get_ydata()[0] == pytest.approx(list(shown)[study.table().attrs["answer"][0]])
    _, points = pareto_points(study)
    shown = {trial.batch_size: value.value for trial, _, value, _ in points}
    assert shown == pytest.approx(judged.to_dict())
    once = make_trial(64, 100, factor=4.0, count=1)  # Better, at a rate that was not repeated.
    study = dataclasses.replace(study, trials=(*study.trials, once))
    curves = {trial.batch_size: curve for trial, curve in learning_curves(study)[1]}
    ends = {size: curve[-1][1].value for size, curve in curves.items()}
    assert ends == pytest.approx(judged.to_dict())


def test_a_figure_names_as_tied_no_size_between_that_left_the_race():
    repeated = [make_trial(size, 800, factor=2.0, count=5) for size in (32, 64, 256)]
    left = make_trial(128, 800, factor=2.0, count=1)
    trials = (*repeated[:2], left, repeated[2])
    study = make_study(*trials, search=make_search(base_batch_size=32, strategy="race"))
    assert study.decide().tied == (32, 64, 256)
    assert "As good: 32, 64 and 256." in words(kbatch.plot_trials(study))


def test_a_figure_calls_sizes_as_good_only_where_they_are_certified():
    study = make_study(*(make_trial(size, 800, count=1) for size in (32, 64, 256)))
    assert not study.decide().certified
    assert "Not told apart: 32 to 256." in words(kbatch.plot_trials(study))


def test_a_race_that_ended_in_its_first_round_compares_all_that_it_tried():
    tried = [
        make_trial(size, wrong, factor=2.0, count=1) for size, wrong in ((32, 800), (128, 4000))
    ]
    raced = pages(
        make_trial(16, 900, factor=2.0, count=2), *tried, strategy="race", batch_sizes=[16, 32, 128]
    )
    assert [trial.batch_size for trial in raced.trials] == [16, 32, 128]
    assert not (raced.certain or raced.certified)
    assert raced.page.certainty.values["race"] and "`max_executions`" in raced.page.headline
    assert (raced.tied, raced.worse) == ((16, 32), (128,))
