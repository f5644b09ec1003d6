"""The decision of a study: the answer, tied and worse sizes, and left-out trials."""

import dataclasses

import numpy as np
import pytest
from matplotlib.text import Text
from records_factory import make_execution, make_search, make_study, make_trial

from kbatch.records.training_run import Budget, Outcomes, Target
from kbatch.study.figures.trials import named_label, plot_trials
from kbatch.study.trial import Objective

LOSS = Objective("val_loss", "min")


def taken(study):
    """The rows of the table that hold the answer."""
    table = study.table()
    return table.loc[table.attrs["answer"]].to_dict("records")


def outcomes(wrong, *, examples, key):
    """Outcomes in 500 blocks that are right on all examples except the wrong ones."""
    values = np.ones(500)
    np.subtract.at(values, np.asarray(wrong, int) % 500, 500 / examples)
    blocks, step = tuple(values.tolist()), 1 / examples
    return Outcomes("val_accuracy", examples, examples // 500, key, blocks, step=step)


def runs(size, *wrong, examples=500, key="k", **changed):
    """A trial with a run for each list of wrong examples."""
    of_trial = {n: changed.pop(n) for n in ("hyperparameters", "trial_id") if n in changed}
    executions = []
    for seed, examples_of_run in enumerate(wrong):
        found = outcomes(examples_of_run, examples=examples, key=key)
        changed |= {"accuracies": (float(np.mean(found.values)),), "outcomes": found}
        executions.append(make_execution(size, seed=seed, **changed))
    return make_trial(size, *executions, **of_trial)


def spread(size, *values):
    """A trial whose metric has no values for blocks."""
    none = {"outcomes": Outcomes(reason="no_sums")}
    own = (make_execution(size, accuracies=(v,), seed=n, **none) for n, v in enumerate(values))
    return make_trial(size, *own)


def many(size, count, *, executions=6, examples=50_000, **changed):
    """A trial of many runs that are wrong on `count` of 50,000 examples and a few random ones."""
    wrong = []
    for number in range(executions):
        rng = np.random.default_rng((size, number, 0))
        wrong.append([*range(count), *rng.choice(examples, 20)])
    return runs(size, *wrong, examples=examples, **changed)


def test_decide_one_example_worse_is_tied():
    slow, fast = runs(32, range(30)), runs(64, range(3, 34), rate=1750.0)
    decision = make_study(slow, fast).decide()
    assert decision.best is slow
    assert (decision.tied, decision.worse, decision.certain) == ((32, 64), (), False)
    assert decision.judgement.gaps[64, 1.0].low < 1 / 500 < decision.judgement.gaps[64, 1.0].high
    assert decision.judgement.obstacle == "one_execution"
    assert "no batch size was trained twice" in decision.reason
    assert "`executions_per_trial=3`" in decision.notes[0]


def test_decide_compares_best_settings_and_budget():
    rung = {"tuner/epochs": 9, "tuner/initial_epoch": 3}
    study = make_study(
        runs(16, range(30), hyperparameters=rung),
        runs(32, range(32), hyperparameters=rung),
        runs(64, range(90), hyperparameters={"tuner/epochs": 3}),
        runs(128, range(40), hyperparameters=rung | {"units": 8}),
        runs(16, range(30), hyperparameters=rung, trial_id="again"),
        make_trial(256, status="failed", hyperparameters=rung),
    )
    decision = study.decide()
    assert decision.tied == (16, 32)
    assert {(trial.batch_size, why) for trial, why in decision.left_out} == {
        (64, "another_budget"),
        (128, "other_settings"),
        (16, "another_trial"),
    }


def test_decide_single_size():
    other = runs(32, range(9), range(9), hyperparameters={"units": 8})
    study = make_study(runs(16, range(3), range(3)), other)
    assert (study.decide().batch_size, study.decide().certain) == (16, False)
    assert "no other batch size can be compared" in study.decide().reason
    verdicts = [row["verdict"] for row in study.decide().page.rows if row["runs"]]
    assert verdicts == ["take", "other settings"]


def test_decide_time_budget_takes_best_mean():
    budget = {"budget": Budget(train_s=60.0)}
    best, fast = many(16, 2000, **budget), many(64, 2010, rate=3000.0, **budget)
    decision = make_study(best, fast, search=make_search(base_batch_size=16)).decide()
    assert (decision.batch_size, decision.certain, decision.tied) == (16, True, (16, 64))
    assert decision.speedup is None


def test_decide_unequal_numbers_of_runs():
    behind, dropped = many(64, 2010, executions=2), many(256, 9000, executions=3)
    decision = make_study(many(16, 2000), many(32, 2005), behind, dropped).decide()
    assert (decision.tied, decision.worse) == ((16, 32, 64), (256,))
    assert decision.left_out == ()


def cut_off(trial):
    """The trial with another run, which was interrupted after a poor epoch."""
    last = make_execution(trial.batch_size, accuracies=(0.1,))
    last = dataclasses.replace(last, status="interrupted")
    return dataclasses.replace(trial, executions=(*trial.executions, last))


def test_decide_ignores_interrupted_run():
    trials = [many(16, 2000, executions=4), many(32, 2005, executions=4, rate=2000.0)]
    fast = many(64, 2010, executions=3, rate=3000.0)
    dropped = many(256, 9000, executions=3, rate=9000.0)
    settings = {"strategy": "race", "batch_sizes": [16, 32, 64, 256]}
    study = make_study(*trials, cut_off(fast), dropped, search=make_search(**settings))
    decision = study.decide()
    assert (decision.batch_size, decision.certain) == (64, True)
    assert (decision.worse, decision.left_out) == ((256,), ())
    assert decision.trial.judged_value == pytest.approx(fast.judged_value)
    (row,) = taken(study)
    assert (row["batch size"], row["runs"]) == (64, 3)
    assert row["judged (95 % interval)"] == pytest.approx(fast.judged_value)
    assert named_label(study) == f"take batch size 64: {fast.judged_value:.4f}"


def test_decide_loss_tolerance_is_share_of_best():
    trials = []
    for size, a in ((16, 0.6), (32, 0.599), (64, 0.3)):
        values, rate = [(a + k / 1e4,) for k in range(3)], float(size)
        own = (make_execution(size, accuracies=v, rate=rate, seed=k) for k, v in enumerate(values))
        trials.append(make_trial(size, *own, objective=LOSS))
    decision = make_study(*trials).decide()
    assert decision.tolerance == pytest.approx(0.02 * (1.1 - 0.6001))
    assert (decision.batch_size, decision.certain, decision.worse) == (32, False, (64,))
    assert decision.judgement.obstacle == "no_outcomes"
    assert "stored no results of single" in decision.reason


H100, A100 = {"device": "GPU:0 NVIDIA H100"}, {"device": "GPU:0 NVIDIA A100"}


def test_decide_ignores_times_of_different_devices():
    trials = many(16, 2000, **A100), many(64, 2010, rate=3000.0, **H100)
    study = make_study(*trials, many(256, 9000, **H100), search=make_search(base_batch_size=16))
    decision = study.decide()
    assert (decision.batch_size, decision.tied, decision.certain) == (16, (16, 64), True)
    devices = "GPU:0 NVIDIA A100 and GPU:0 NVIDIA H100"
    drawn = " ".join(text.get_text() for text in plot_trials(study).figure.findobj(Text))
    (note,) = [note for note in decision.notes if note.code == "devices_differ"]
    for words in (note, " ".join(drawn.split())):
        assert devices in words
    assert not any("times" in row["verdict"] for row in decision.page.rows)
    taken = dataclasses.replace(study, search=make_search(base_batch_size=64)).decide()
    assert taken.batch_size == 16 and taken.speedup is None
    # On one kind of device, the fastest size is named.
    assert make_study(many(16, 2000, **H100), trials[1]).decide().batch_size == 64


def test_decide_trial_on_two_devices():
    trials = []
    for one in (many(16, 2000), many(64, 9000)):
        pairs = zip(one.executions, [H100, A100] * 3, strict=True)
        both = tuple(dataclasses.replace(run, **device) for run, device in pairs)
        trials.append(dataclasses.replace(one, executions=both))
    study = make_study(*trials)
    assert (study.decide().batch_size, study.decide().worse) == (16, (64,))
    # The best time is named, and not compared.
    rates = Objective("samples_per_second", "max")
    timed = [dataclasses.replace(trial, objective=rates) for trial in trials]
    decision = make_study(*timed).decide()
    assert decision.trial is timed[0]
    assert decision.left_out == ((timed[1], "another_device"),)


def test_decide_time_to_target_and_throughput():
    target = Target("val_accuracy", 0.95, "max")

    def cost(size, *epochs):
        values = [(*[0.5] * (n - 1), 0.96) for n in epochs]
        met = {"target": target}
        own = (make_execution(size, accuracies=v, seed=k, **met) for k, v in enumerate(values))
        return make_trial(size, *own, objective=Objective("seconds_to_target", "min"))

    run = make_execution(128, accuracies=(0.6,), target=target)
    never = make_trial(128, run, objective=cost(8, 2).objective)
    search = make_search(base_batch_size=16)
    decision = make_study(cost(16, 9, 9, 9), cost(32, 4, 4, 4), never, search=search).decide()
    assert (decision.batch_size, decision.worse, decision.certain) == (32, (16,), True)
    assert decision.left_out == ((never, "no_value"),)
    assert decision.speedup.value == pytest.approx(9 / 4)
    assert decision.page.sentences[2].endswith("size 16 in this search: 2.2 times as fast.")
    assert "callbacks_needed" in [note.code for note in decision.notes]
    # Equal numbers of epochs do not show that the times are equal.
    coarse = make_study(cost(16, 4, 4, 4), cost(32, 4, 4, 4), search=search).decide()
    assert (coarse.certain, coarse.judgement.coarse) == (False, True)
    assert "coarse_target" in [note.code for note in coarse.notes]
    rates = Objective("samples_per_second", "max")
    fast = make_study(*(make_trial(s, objective=rates, rate=100.0 * s) for s in (16, 32))).decide()
    assert (fast.batch_size, fast.worse, fast.certain) == (32, (16,), False)
    assert fast.judgement.obstacle == "one_execution"


def test_decide_several_objectives_takes_best_mean():
    several = Objective("multi_objective", "min")
    trials = [
        make_trial(size, objective=several, reported={"multi_objective": value})
        for size, value in ((16, 0.5), (32, 0.4))
    ]
    decision = make_study(*trials).decide()
    assert (decision.batch_size, decision.tied, decision.certain) == (32, (), False)
    assert "several objectives" in decision.reason


def test_decide_other_validation_rows():
    wrong = [range(30), range(31), range(32)]
    decision = make_study(runs(16, *wrong), runs(32, *wrong, key="other")).decide()
    assert decision.unpaired == "other_examples"
    assert "drop_remainder" in decision.reason
    assert not decision.certain
    blocks = dataclasses.replace(outcomes(wrong[0], examples=500, key="k"), block_examples=9)
    cut = make_study(runs(16, *wrong), make_trial(32, outcomes=blocks)).decide()
    assert (cut.unpaired, cut.certain) == ("other_blocks", False)


def test_decide_metric_without_outcomes():
    several = make_study(spread(16, 0.9, 0.91, 0.92), spread(32, 0.5, 0.51, 0.52)).decide()
    assert (several.worse, several.certain) == ((32,), False)
    assert several.unpaired == "no_sums"
    assert "does not add up" in several.reason
    single = make_study(spread(16, 0.9), spread(32, 0.5)).decide()
    assert (single.tied, single.judgement.gaps, single.certain) == ((16, 32), {}, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tolerance", v) for v in (-0.1, float("nan"), True, "1 %", 1.0)]
    + [("confidence", v) for v in (0.5, 95, "high", float("nan"))],
)
def test_decide_refuses_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"`{name}` .*Received: {name}="):
        make_study().decide(**{name: value})


def test_decide_tolerance_of_search_and_argument():
    trials = many(16, 2000), many(64, 2600, rate=3000.0)
    assert make_study(*trials).decide().worse == (64,)
    assert make_study(*trials).decide(0.02).batch_size == 64
    kept = make_study(*trials, search=make_search(tolerance=0.02, confidence=0.9))
    assert (kept.decide().batch_size, kept.decide().confidence) == (64, 0.9)


def test_decide_extended_grid_has_wider_intervals():
    widths = []
    for asked in ([6], [1, 6], [2, 4, 6]):
        search = make_search(executions_asked=asked)
        study = make_study(many(16, 2000), many(64, 2000), search=search)
        gap = study.decide().judgement.gaps[64, 1.0]
        widths.append(gap.high - gap.low)
    assert widths[0] == widths[1] < widths[2]


def test_decide_compares_answer_with_base_size():
    trials = [runs(16, *[range(30)] * 3), runs(32, *[range(28)] * 3, rate=1900.0)]
    decision = make_study(*trials, search=make_search(base_batch_size=16)).decide()
    assert decision.batch_size == 32
    assert decision.speedup.value == pytest.approx(1.9)
    assert ": training steps run 1.9 times as fast, " in decision.page.sentences[2]
    same = make_study(*trials, search=make_search(base_batch_size=32)).decide()
    assert (same.speedup, len(same.page.sentences)) == (None, 2)
    assert same.page.sentences[0].startswith("Keep batch size 32")
    fewer = runs(16, *[range(90)] * 3), trials[1]
    worse = make_study(*fewer, search=make_search(base_batch_size=16)).decide()
    assert worse.page.sentences[2].endswith("validation accuracy higher by 0.124.")


def test_judged_interval_of_single_run_is_over_examples():
    trial = runs(64, range(50))
    values = trial.executions[0].outcomes.values
    half = 1.9647 * np.std(values, ddof=1) / np.sqrt(500)
    lower = plot_trials(make_study(trial)).figure.axes[-1]
    (bars,) = lower.collections
    assert bars.get_segments()[0][:, 1] == pytest.approx((0.9 - half, 0.9 + half), abs=1e-5)
    assert "0.9000 (0.8736 to 0.9264)" in str(make_study(trial))
    # The same holds for two runs, because a t interval of two values is too wide.
    pair = dataclasses.replace(trial, executions=trial.executions * 2)
    assert pair.judged().ends == pytest.approx((0.9 - half, 0.9 + half), abs=1e-5)
