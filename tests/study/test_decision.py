"""Which batch size a study decides for, which are as good, and what it says of it."""

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
    """The rows of the table that the answer names."""
    table = study.table()
    return table.loc[table.attrs["answer"]].to_dict("records")


def outcomes(wrong, *, examples=500, key="k", metric="val_accuracy"):
    """Right on all examples but these; a value each, or 500 blocks of more of them."""
    values = np.ones(500)
    np.subtract.at(values, np.asarray(wrong, int) % 500, 500 / examples)
    fields = {"metric": metric, "examples": examples, "key": key, "step": 1 / examples}
    return Outcomes(values=tuple(values.tolist()), block_examples=examples // 500, **fields)


def runs(size, *wrong, rate=1000.0, examples=500, **changed):
    """A trial with an execution for each list of the examples that it gets wrong."""
    known = {name: changed.pop(name) for name in ("key", "metric") if name in changed}
    trial = {
        n: changed.pop(n) for n in ("objective", "hyperparameters", "trial_id") if n in changed
    }
    executions = [
        make_execution(
            size,
            accuracies=(float(np.mean(found.values)),),
            rate=rate,
            seed=number,
            outcomes=found,
            **changed,
        )
        for number, found in enumerate(outcomes(w, examples=examples, **known) for w in wrong)
    ]
    return make_trial(size, *executions, **trial)


def spread(size, *values):
    """A trial whose metric has no values of blocks."""
    none = {"outcomes": Outcomes(reason="no_sums")}
    own = (make_execution(size, accuracies=(v,), seed=n, **none) for n, v in enumerate(values))
    return make_trial(size, *own)


def many(size, count, *, executions=6, rate=1000.0, salt=0, examples=50_000, **changed):
    """A trial of many executions that is wrong on so many of 50,000 examples."""
    wrong = []
    for number in range(executions):
        rng = np.random.default_rng((size, number, salt))
        wrong.append([*range(count), *rng.choice(examples, 20)])
    return runs(size, *wrong, rate=rate, examples=examples, **changed)


def test_a_faster_size_that_is_one_image_worse_is_tied():
    slow, fast = runs(32, range(30)), runs(64, range(3, 34), rate=1750.0)
    found = make_study(slow, fast).decide()
    assert found.best is slow
    assert (found.tied, found.worse, found.certain) == ((32, 64), (), False)
    assert found.judgement.gaps[64, 1.0].low < 1 / 500 < found.judgement.gaps[64, 1.0].high
    assert found.judgement.obstacle == "one_execution"
    assert "no batch size was trained twice" in found.reason
    assert "`executions_per_trial=3`" in found.notes[0]


def test_only_trials_of_the_best_settings_and_budget_are_compared():
    rung = {"tuner/epochs": 9, "tuner/initial_epoch": 3}
    study = make_study(
        runs(16, range(30), hyperparameters=rung),
        runs(32, range(32), hyperparameters=rung),
        runs(64, range(90), hyperparameters={"tuner/epochs": 3}),
        runs(128, range(40), hyperparameters=rung | {"units": 8}),
        runs(16, range(30), hyperparameters=rung, trial_id="again"),
        make_trial(256, status="failed", hyperparameters=rung),
    )
    found = study.decide()
    assert found.tied == (16, 32)
    assert {(trial.batch_size, why) for trial, why in found.left_out} == {
        (64, "another_budget"),
        (128, "other_settings"),
        (16, "another_trial"),
    }


def test_a_size_alone_is_compared_with_none():
    other = runs(32, range(9), range(9), hyperparameters={"units": 8})
    study = make_study(runs(16, range(3), range(3)), other)
    assert (study.decide().batch_size, study.decide().certain) == (16, False)
    assert "no other batch size can be compared" in study.decide().reason
    assert [row["verdict"] for row in study.decide().page.rows if row["runs"]] == [
        "take",
        "other settings",
    ]


def test_under_a_budget_of_seconds_the_best_mean_counts():
    budget = {"budget": Budget(train_s=60.0)}
    best, fast = many(16, 2000, **budget), many(64, 2010, rate=3000.0, **budget)
    found = make_study(best, fast, search=make_search(base_batch_size=16)).decide()
    assert (found.batch_size, found.certain, found.tied) == (16, True, (16, 64))
    assert found.speedup is None


def test_sizes_with_fewer_executions_are_compared_over_the_rounds_that_they_have():
    behind, dropped = many(64, 2010, executions=2), many(256, 9000, executions=3)
    found = make_study(many(16, 2000), many(32, 2005), behind, dropped).decide()
    assert (found.tied, found.worse) == ((16, 32, 64), (256,))
    assert found.left_out == ()


def cut_off(trial):
    """The trial with one more execution, which was interrupted after a poor epoch."""
    last = make_execution(trial.batch_size, accuracies=(0.1,))
    last = dataclasses.replace(last, status="interrupted")
    return dataclasses.replace(trial, executions=(*trial.executions, last))


def test_of_a_size_that_a_race_was_interrupted_in_the_executions_before_count():
    trials = [many(16, 2000, executions=4), many(32, 2005, executions=4, rate=2000.0)]
    fast = many(64, 2010, executions=3, rate=3000.0)
    dropped = many(256, 9000, executions=3, rate=9000.0)
    settings = {"strategy": "race", "batch_sizes": [16, 32, 64, 256]}
    study = make_study(*trials, cut_off(fast), dropped, search=make_search(**settings))
    found = study.decide()
    assert (found.batch_size, found.certain) == (64, True)
    assert (found.worse, found.left_out) == ((256,), ())
    assert found.trial.judged_value == pytest.approx(fast.judged_value)
    (row,) = taken(study)
    assert (row["batch size"], row["runs"]) == (64, 3)
    assert row["judged (95 % interval)"] == pytest.approx(fast.judged_value)
    assert named_label(study) == f"take batch size 64: {fast.judged_value:.4f}"


def test_a_loss_is_compared_by_its_share_and_downwards():
    trials = []
    for size, a in ((16, 0.6), (32, 0.599), (64, 0.3)):
        values, rate = [(a + k / 1e4,) for k in range(3)], float(size)
        own = (make_execution(size, accuracies=v, rate=rate, seed=k) for k, v in enumerate(values))
        trials.append(make_trial(size, *own, objective=LOSS))
    found = make_study(*trials).decide()
    assert found.tolerance == pytest.approx(0.02 * (1.1 - 0.6001))
    assert (found.batch_size, found.certain, found.worse) == (32, False, (64,))
    assert found.judgement.obstacle == "no_outcomes"
    assert "the records hold no outcomes" in found.reason


H100, A100 = {"device": "GPU:0 NVIDIA H100"}, {"device": "GPU:0 NVIDIA A100"}


def test_times_on_different_devices_decide_nothing_and_every_page_says_so():
    trials = many(16, 2000, **A100), many(64, 2010, rate=3000.0, **H100)
    study = make_study(*trials, many(256, 9000, **H100), search=make_search(base_batch_size=16))
    found = study.decide()
    assert (found.batch_size, found.tied, found.certain) == (16, (16, 64), True)
    where = "GPU:0 NVIDIA A100 and GPU:0 NVIDIA H100"
    drawn = " ".join(text.get_text() for text in plot_trials(study).figure.findobj(Text))
    (note,) = [note for note in found.notes if note.code == "devices_differ"]
    for words in (note, " ".join(drawn.split())):
        assert where in words
    assert not any("times" in row["verdict"] for row in found.page.rows)
    taken = dataclasses.replace(study, search=make_search(base_batch_size=64)).decide()
    assert taken.batch_size == 16 and taken.speedup is None
    # On one kind the fastest of them is named.
    assert make_study(many(16, 2000, **H100), trials[1]).decide().batch_size == 64


def test_a_trial_on_two_devices_is_compared_by_its_metric_alone():
    trials = []
    for one in (many(16, 2000), many(64, 9000)):
        pairs = zip(one.executions, [H100, A100] * 3, strict=True)
        both = tuple(dataclasses.replace(run, **device) for run, device in pairs)
        trials.append(dataclasses.replace(one, executions=both))
    study = make_study(*trials)
    assert (study.decide().batch_size, study.decide().worse) == (16, (64,))
    # The best time is named, and compared with none.
    rates = Objective("samples_per_second", "max")
    timed = [dataclasses.replace(trial, objective=rates) for trial in trials]
    found = make_study(*timed).decide()
    assert found.trial is timed[0]
    assert found.left_out == ((timed[1], "another_device"),)


def test_costs_and_throughput_are_compared_over_executions():
    target = Target("val_accuracy", 0.95, "max")

    def cost(size, *epochs):
        values = [(*[0.5] * (n - 1), 0.96) for n in epochs]
        met = {"target": target}
        own = (make_execution(size, accuracies=v, seed=k, **met) for k, v in enumerate(values))
        return make_trial(size, *own, objective=Objective("seconds_to_target", "min"))

    never = make_trial(
        128, make_execution(128, accuracies=(0.6,), target=target), objective=cost(8, 2).objective
    )
    search = make_search(base_batch_size=16)
    found = make_study(cost(16, 9, 9, 9), cost(32, 4, 4, 4), never, search=search).decide()
    assert (found.batch_size, found.worse, found.certain) == (32, (16,), True)
    assert found.left_out == ((never, "no_value"),)
    assert found.speedup.value == pytest.approx(9 / 4)
    assert found.page.sentences[2] == "Compared with your batch size 16: 2.2 times as fast."
    assert "callbacks_needed" in [note.code for note in found.notes]
    # Equal numbers of epochs do not show that the times are equal.
    coarse = make_study(cost(16, 4, 4, 4), cost(32, 4, 4, 4), search=search).decide()
    assert (coarse.certain, coarse.judgement.coarse) == (False, True)
    assert "coarse_target" in [note.code for note in coarse.notes]
    rates = Objective("samples_per_second", "max")
    fast = make_study(*(make_trial(s, objective=rates, rate=100.0 * s) for s in (16, 32))).decide()
    assert (fast.batch_size, fast.worse, fast.certain) == (32, (16,), False)
    assert fast.judgement.obstacle == "one_execution"


def test_several_objectives_fall_back_to_the_best_mean():
    several = Objective("multi_objective", "min")
    trials = [
        make_trial(size, objective=several, reported={"multi_objective": value})
        for size, value in ((16, 0.5), (32, 0.4))
    ]
    found = make_study(*trials).decide()
    assert (found.batch_size, found.tied, found.certain) == (32, (), False)
    assert "several objectives" in found.reason


def test_trials_that_were_validated_on_other_rows_are_compared_by_their_executions():
    wrong = [range(30), range(31), range(32)]
    found = make_study(runs(16, *wrong), runs(32, *wrong, key="other")).decide()
    assert found.unpaired == "other_examples"
    assert "drop_remainder" in found.reason
    assert not found.certain


def test_a_metric_that_is_no_mean_over_examples_is_compared_by_seeds_alone():
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
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` .*Received: {name}="):
        make_study().decide(**{name: value})


def test_the_search_keeps_its_tolerance_and_a_wider_one_certifies_more():
    trials = many(16, 2000), many(64, 2600, rate=3000.0)
    assert make_study(*trials).decide().worse == (64,)
    assert make_study(*trials).decide(0.02).batch_size == 64
    kept = make_study(*trials, search=make_search(tolerance=0.02, confidence=0.9))
    assert (kept.decide().batch_size, kept.decide().confidence) == (64, 0.9)


def test_a_grid_that_was_extended_shares_its_error_over_the_looks():
    widths = []
    for asked in ([6], [1, 6], [2, 4, 6]):
        search = make_search(executions_asked=asked)
        study = make_study(many(16, 2000), many(64, 2000), search=search)
        gap = study.decide().judgement.gaps[64, 1.0]
        widths.append(gap.high - gap.low)
    assert widths[0] == widths[1] < widths[2]


def test_the_base_size_is_compared_in_time_and_in_the_metric():
    trials = [runs(16, *[range(30)] * 3), runs(32, *[range(28)] * 3, rate=1900.0)]
    found = make_study(*trials, search=make_search(base_batch_size=16)).decide()
    assert found.batch_size == 32
    assert found.speedup.value == pytest.approx(1.9)
    assert found.page.sentences[2].startswith("Compared with your batch size 16: 1.9 times as fast")
    same = make_study(*trials, search=make_search(base_batch_size=32)).decide()
    assert (same.speedup, len(same.page.sentences)) == (None, 2)
    assert same.page.sentences[0].startswith("Keep batch size 32")
    fewer = runs(16, *[range(90)] * 3), trials[1]
    worse = make_study(*fewer, search=make_search(base_batch_size=16)).decide()
    assert worse.page.sentences[2].endswith("validation accuracy higher by 0.124.")


def test_one_execution_has_an_interval_over_the_validation_examples():
    trial = runs(64, range(50))
    values = trial.executions[0].outcomes.values
    half = 1.9647 * np.std(values, ddof=1) / np.sqrt(500)
    lower = plot_trials(make_study(trial)).figure.axes[-1]
    (bars,) = lower.collections
    assert bars.get_segments()[0][:, 1] == pytest.approx((0.9 - half, 0.9 + half), abs=1e-5)
    assert "0.9000 (0.8736 to 0.9264)" in str(make_study(trial))
    # So have two, because a t interval of two values says nothing.
    pair = dataclasses.replace(trial, executions=trial.executions * 2)
    assert pair.judged().ends == pytest.approx((0.9 - half, 0.9 + half), abs=1e-5)
