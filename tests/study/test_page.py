"""The page of a decision: its texts, and that sentences, tables and figures agree."""

import dataclasses
import html
import math
import re

import numpy as np
import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text
from records_factory import (
    FAILURES,
    make_diverged,
    make_epochs,
    make_execution,
    make_search,
    make_study,
)
from records_factory import make_trial as trial_of

import kbatch
from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS, LearningRateScaling
from kbatch.page.document import shown_columns
from kbatch.page.numbers import pluralize
from kbatch.plotting import canvas
from kbatch.records.notes import Note
from kbatch.records.training_run import Outcomes
from kbatch.study.compared_trials import tolerance_text
from kbatch.study.decision import frame_of, race_task, speed_against
from kbatch.study.figures.quality import learning_curves, pareto_points
from kbatch.study.figures.trials import named_label
from kbatch.study.limits import notes_of
from kbatch.study.page import with_page
from kbatch.study.trial import Objective

BEGINS = ("initial_weights", "first_order")
OBJECTIVES = (
    Objective("val_accuracy", "max"),
    Objective("val_loss", "min"),
    Objective("accuracy", "max"),
    Objective("samples_per_second", "max"),
)
SIZES = (8, 16, 32, 64, 128, 256, 1024, 2048)
P_ENDS = {"completed": 0.8, "diverged": 0.05, "out_of_memory": 0.03, "failed": 0.02}
P_ENDS |= {"interrupted": 0.02, "short": 0.05, "stopped_early": 0.03}
SHARES = {"race": 0.5, "outcomes": 0.8, "timed": 0.8, "units": 0.15, "own_fit": 0.1}
NAN_EPOCH = make_diverged(8).executions[0].epochs[0]


def make_trial(size, errors, *, rate=1000.0, factor=None, scatter=8, epochs=1, count=3, **changed):
    """A trial whose runs are wrong on `errors` of 20,000 validation examples."""
    runs = []
    ratio = (factor or 1.0) * (size / 32) ** 0.5
    betas = {"given": {"beta_2": (0.999,)}, "made": {"beta_2": (0.999 ** (size / 32),)}}
    scaling = LearningRateScaling("sqrt", size, 32, ratio, 0.001 * ratio, ("beta_2",), **betas)
    changed |= {"rate": rate, "scaling": scaling}
    for seed in range(count):
        wrong = np.random.default_rng((size, seed)).choice(20_000, scatter, replace=False)
        values = np.ones(20_000)
        values[:: 20_000 // errors] = 0
        values[wrong] = 0
        blocks = tuple(values.reshape(50, 400).mean(1).tolist())
        outcomes = Outcomes("val_accuracy", 20_000, 400, "k", blocks, step=1 / 20_000)
        curve = make_epochs([values.mean() - 0.02 * k for k in reversed(range(epochs))])
        runs.append(make_execution(size, seed=seed, outcomes=outcomes, epochs=curve, **changed))
    tuned = {} if factor is None else {FACTOR_NAME: factor}
    return trial_of(size, *runs, hyperparameters=tuned, trial_id=f"{size}-{factor}")


def pages(*trials, **settings):
    search = make_search(**({"base_batch_size": 32, "batch_sizes": []} | settings))
    return make_study(*trials, search=search).decide()


def verdicts(decision):
    return [row["verdict"] for row in decision.page.rows]


def codes(decision):
    return [note.code for note in decision.notes]


def certain(**changed):
    return pages(
        make_trial(32, 800, rate=1000.0),
        make_trial(64, 800, rate=2000.0, **changed),
        make_trial(128, 800, rate=2060.0),
        make_trial(256, 2000, rate=4000.0, micro_batch_size=200),
    )


WEIGHTED = ("arrays", "y", "sample_weight")


@pytest.mark.parametrize(
    ("changed", "call"),
    [
        ({"plan": None}, "call your HyperModel's `fit` with `batch_size=64`"),
        ({"first_order": "as given"}, "training_dataset(x, y, 64, shuffle=False), epochs="),
        ({"first_order": "ab12"}, "training_dataset(x, y, 64), epochs="),
        ({"data": ("arrays", "y")}, "training_dataset(x, y, 64), epochs="),
        ({"data": ("arrays",)}, "training_dataset(x, batch_size=64), epochs="),
        ({"data": ("dataset",)}, "training_dataset(data, batch_size=64), epochs="),
        ({"data": ("PyDataset",)}, "training_dataset(data, batch_size=64), epochs="),
        ({"data": ("function", "class_weight")}, "64), class_weight=class_weight, epochs="),
        ({"data": WEIGHTED}, "(x, y, 64, sample_weight=sample_weight), epochs="),
    ],
    ids=str,
)
def test_page_use(changed, call):
    assert call in certain(**changed).page.use[-1]


def test_page_takes_smallest_of_fastest_sizes():
    decision = certain(steps_per_execution=8)
    assert (decision.batch_size, decision.certain) == (64, True)
    assert (decision.best.batch_size, decision.tied, decision.worse) == (128, (32, 64, 128), (256,))
    page = decision.page
    assert page.sentences == (
        "Train with batch size 64 and learning rate 0.00141.",
        "Certain at 95 % confidence, for the learning rates that were tried: batch size 64 is "
        "within 0.01 of the best validation accuracy, and no such size trains 5 % faster.",
        "Compared with batch size 32 in this search: training steps run 2.0 times as fast, "
        "same validation accuracy within 0.01.",
    )
    assert decision.reason == page.sentences[1]
    assert [row["batch size"] for row in page.rows] == [32, 64, 128, 256]
    times = [row["training time (s)"] for row in page.rows]
    assert times == pytest.approx([2.874, 1.437, 1.395, 0.7185], rel=1e-3)
    assert verdicts(decision) == [
        "as accurate, 2.0 times slower",
        "take",
        "as accurate, as fast",
        "less accurate by 0.06 at learning rate 0.00283, 2.0 times as fast",
    ]
    assert page.use[1] == "  model = decision.apply(build)"
    assert page.use[2:] == ("  model.fit(kbatch.training_dataset(x, y, 64), epochs=1)",)
    assert page.cost == "Search: 12 complete trainings, which took 48 s. Notes: 3 (decision.notes)."
    assert codes(decision) == ["rate_unchecked", "also_set", "batches_whole"]
    texts = "`steps_per_execution` to 8", "one batch in 8.", "`beta_2` from 0.999 to 0.998"
    assert all(text in decision.notes[1] for text in texts)
    assert str(decision).splitlines()[0] == page.sentences[0]
    text = decision._repr_html_().replace("\N{NO-BREAK SPACE}", " ")
    assert html.escape("\n".join(line.strip() for line in page.use[1:])) in text
    assert all(f"{html.escape(said)}</p>" in text for said in (*page.sentences, page.use[0]))
    assert text.count("<tr") == 1 + len(page.rows) and "Search: 12" in text


def timed(size, *rates, **changed):
    """A trial whose runs have these samples/s."""
    trials = [make_trial(size, 800, rate=r, count=n, **changed) for n, r in enumerate(rates, 1)]
    return dataclasses.replace(trials[-1], executions=tuple(t.executions[-1] for t in trials))


@pytest.mark.parametrize(
    ("rates", "proved", "verdict", "change"),
    [
        ((1000.0, 1010.0, 990.0), True, "2.0 times slower", "2.0 times as fast"),
        ((900.0, 1000.0, 1100.0), True, "2.0 times slower", "2.0 (1.6 to 2.6) times as fast"),
        ((1000.0, 2500.0, 1000.0), False, *["difference in speed not known"] * 2),
        ((1990.0, 2000.0, 1980.0), True, "as fast", "as fast"),
        ((1900.0, 2000.0, 2100.0), False, *["as fast within 13 %"] * 2),
        ((1000.0, 1010.0), False, "2.0 times slower", "2.0 times as fast (two runs)"),
        ((1000.0,), False, "2.0 times slower", "2.0 times as fast (one run)"),
    ],
)
def test_page_claims_speed_only_if_times_show_it(rates, proved, verdict, change):
    race = {"strategy": "race", "batch_sizes": [32, 64]} if len(rates) < 3 else {}
    trials = timed(32, *rates, factor=1.0), timed(64, *[2000.0] * len(rates), factor=1.0)
    base = 64 if verdict.startswith("as fast") else 32  # It is compared with the size named.
    decision = pages(*trials, base_batch_size=base, **race)
    assert decision.certain and decision.reason.endswith("5 % faster.") is proved
    assert sorted(verdicts(decision))[0].endswith(f", {verdict}")
    steps = "" if change.endswith("not known") else "training steps run "
    assert f": {steps}{change}, same validation accuracy" in decision.page.sentences[2]


def test_note_times_scatter():
    speeds = ((True, 1.4, 0.98, 2.0), (False, 1.04, 0.9, 1.2), (False, 1.4, 1.3, 1.5))
    for noted, *speedup in speeds:
        decision = dataclasses.replace(certain(), speedup=Estimate(*speedup))
        notes = notes_of(decision, decision.trials, {}, missing=0, problems=())
        assert ("times_scatter" in [note.code for note in notes]) is noted


def test_decide_with_labels_sorted_by_class_is_not_certain():
    assert certain().certain
    decision = certain(notes=(Note.of("split_by_class", what="they are of 1 of 2 classes"),))
    assert (decision.certain, decision.certified, decision.batch_size) == (False, False, 64)
    assert decision.reason.startswith("Not certain: the labels are sorted by class")
    assert "split_by_class" in codes(decision) and "to_be_certain" not in codes(decision)
    assert "not certain" in decision.page.sentences[2] and decision.worse == ()
    assert all("(not certain)" in verdict for verdict in verdicts(decision) if verdict != "take")


def test_note_also_set_has_old_and_new_value():
    # The base size has another rate than the build function, too.
    name = "weight_decay"
    decays = {"given": {name: (0.004,)}, "made": {name: (0.002,)}}
    scaling = LearningRateScaling("sqrt", 32, 32, 2.0, 0.02, (name,), **decays)
    decision = make_study(trial_of(32, scaling=scaling)).decide()
    assert decision.settings["weight_decay"] == pytest.approx(0.002)
    assert any("`weight_decay` from 0.004 to 0.002" in note for note in decision.notes)


def test_note_rate_unchecked():
    (note,) = [note for note in certain().notes if note.code == "rate_unchecked"]
    assert (note.values["rate"], note.values["size"]) == ("0.001", "32")
    trials = make_trial(32, 800), make_trial(64, 800)
    assert "rate_unchecked" not in codes(pages(*trials, search_learning_rate=False))


@pytest.mark.parametrize(
    ("factor", "wrong", "far"),
    [
        (4.0, 2000, "small"),
        (0.25, 2000, "large"),
        (4.0, 805, None),  # Within the noise.
        (FACTORS[-1], 2000, "small"),
        (1.0, 2000, None),
    ],
)
def test_note_rate_off_only_beyond_noise(factor, wrong, far):
    other = 4.0 if factor == 1 else 1.0
    trials = make_trial(32, 800, factor=factor), make_trial(64, 805, factor=factor)
    alone = pages(*trials)
    assert "rate_off" not in codes(alone)
    decision = pages(*trials, make_trial(32, wrong, factor=other, count=1))
    notes = [note.values for note in decision.notes if note.code == "rate_off"]
    assert [(note["seems"], note["far"]) for note in notes] == [("is", far)] * (far is not None)
    assert [bool(note["more"]) for note in notes] == [factor == FACTORS[-1]] * (far is not None)
    assert decision.learning_rate == pytest.approx(0.001 * factor)
    assert FACTOR_NAME not in str(decision)


def test_note_rate_off_compares_equal_epochs():
    whole = make_trial(32, 800, factor=4.0, epochs=8)
    short = make_trial(32, 800, factor=1.0, epochs=8, count=1)
    # Both have the same values in their first two epochs.
    run = dataclasses.replace(short.executions[0], epochs=whole.executions[0].epochs[:2])
    short = dataclasses.replace(short, executions=(run,))
    decision = pages(whole, make_trial(64, 805, factor=4.0, epochs=8), short)
    assert "rate_off" not in codes(decision)
    short = dataclasses.replace(run, length="short", epochs_asked=8, batch_size=128)
    stopped = dataclasses.replace(short, length="stopped_early", batch_size=256)
    decision = pages(whole, *(trial_of(one.batch_size, one) for one in (short, stopped)))
    assert verdicts(decision)[1:] == ["only a short run (2 epochs)", "stopped early (2 epochs)"]
    assert decision.page.cost.startswith("Search: 3.5 complete trainings")
    worse = make_trial(32, 10_000, factor=1.0, count=1).executions[0]
    run = dataclasses.replace(run, epochs=2 * worse.epochs, length="short", epochs_asked=8)
    short = trial_of(32, run, hyperparameters={FACTOR_NAME: 1.0}, trial_id="short")
    (note,) = (n for n in pages(whole, short).notes if n.code == "rate_off")
    assert "may be too small. In short runs of 2 epochs at" in note and "0.4998 at learning" in note


def test_verdict_of_values_equal_up_to_rounding():
    values = (0.53125, 0.53125 + 1e-15)
    runs = [make_execution(n, accuracies=(v, v)) for n, v in zip((32, 64), values, strict=True)]
    decision = pages(*(trial_of(run.batch_size, run) for run in runs))
    assert sum("as accurate" in one for one in verdicts(decision)) == 1
    assert "validation accuracy equal" in decision.page.sentences[2]


def test_verdict_best_value_is_highest_judged_value():
    trials = make_trial(32, 700), make_trial(64, 760), make_trial(128, 800, rate=4000.0)
    decision = pages(*trials)
    # A race takes as best the size that is ahead on its curve.
    curve = dataclasses.replace(decision, best=decision.trials[1])
    named = [with_page(d, trials, [], (), None).page.rows[0]["verdict"] for d in (decision, curve)]
    assert all("as accurate (best value)" in verdict for verdict in named)


def test_note_shown_better():
    trials = make_trial(32, 1000), make_trial(64, 800, rate=3000.0)
    decision = pages(*trials)
    assert decision.batch_size == 64 and "shown_better" not in codes(decision)
    judgement = dataclasses.replace(decision.judgement, named=(32, 1.0))
    other = dataclasses.replace(decision, trial=trials[0], judgement=judgement)
    notes = [*notes_of(other, trials, {}, missing=0, problems=())]
    (note,) = [n for n in notes if n.code == "shown_better"]
    assert (note.values["sizes"], note.values["named"]) == ("batch size 64", "32")


def test_race_of_settings_takes_best_one():
    short = {"length": "short", "epochs_asked": 8, "epochs_repeated": 2}
    trials = [
        trial_of(32, make_execution(32, accuracies=(a, a), **short), hyperparameters={"units": n})
        for n, a in ((8, 0.7), (16, 0.8), (32, 0.75))
    ]
    decision = pages(*trials, strategy="race", batch_sizes=[32, 64])
    assert decision.trial.hyperparameters["units"] == 16
    task = race_task(trials, {"batch_sizes": [32, 64], "max_trainings": 5})
    assert task.max_trainings == 5 - 3 * 2 / 8


@pytest.mark.parametrize("sizes", [[32, 64], [32]], ids=str)
def test_notes_of_answer_from_short_runs(sizes):
    run = make_execution(32, accuracies=(0.8, 0.9), length="short", epochs_asked=8)
    trial = trial_of(32, run, hyperparameters={FACTOR_NAME: 1.0})
    decision = pages(trial, strategy="race", batch_sizes=sizes)
    assert decision.batch_size == 32 and "callbacks_needed" not in codes(decision)
    one = {"sizes_not_compared" if sizes[1:] else "to_be_certain"}
    assert {"sizes_not_compared", "to_be_certain"} & {*codes(decision)} == one


def test_page_has_one_row_for_each_size():
    trials = [make_trial(32, 800, factor=2.0), make_trial(64, 805, factor=2.0)]
    trials += [make_trial(32, 950, factor=1.0, count=1), make_trial(64, 990, factor=1.0, count=1)]
    decision = pages(*trials, make_diverged(128))
    assert [row["batch size"] for row in decision.page.rows] == [32, 64, 128]
    table = make_study(*trials).table()
    assert [list(table[name]) for name in ("rates tried", "runs")] == [[2, 2], [3, 3]]
    assert list(table["learning rate"]) == pytest.approx([0.002, 0.002 * 2**0.5])
    assert verdicts(decision)[:2] == ["take", "as accurate, as fast"]
    assert verdicts(decision)[2] == "diverged at learning rate 0.001"
    other = dataclasses.replace(make_trial(128, 700), hyperparameters={"units": 8})
    mixed = pages(make_trial(32, 600), make_trial(64, 600, rate=3000.0), other)
    assert verdicts(mixed)[2] == "other settings"


def test_left_out_far_rate():
    trials = [make_trial(size, 800, factor=16.0) for size in (32, 64)]
    trials += [make_trial(size, 900, factor=1.0, count=1) for size in (64, 128)]
    other = dataclasses.replace(make_trial(32, 950, count=1), hyperparameters={"units": 8})
    decision = pages(*trials, other, strategy="race", batch_sizes=[32, 64, 128])
    left_out = {(trial.batch_size, why) for trial, why in decision.left_out}
    assert left_out == {(64, "another_trial"), (128, "far_rate"), (32, "other_settings")}


@pytest.mark.parametrize(
    ("order", "slow", "planned_s"),
    [
        ((32, 64) * 3, 1, (6.0, 1.0)),  # The plan was wrong.
        ((32, 32, 32, 64, 64, 64, 32), 4, (3.0, 3.0)),  # Another program began after three runs.
    ],
)
def test_race_times_follow_runs_without_a_sudden_load(order, slow, planned_s):
    trials = []
    for size in (32, 64):
        places = [place for place, of_size in enumerate(order) if of_size == size]
        trial = timed(size, *(1000.0 / (slow if place > 2 else 1) for place in places), factor=1.0)
        pairs = zip(trial.executions, places, strict=True)
        runs = tuple(dataclasses.replace(run, place=place + 1) for run, place in pairs)
        trials.append(dataclasses.replace(trial, executions=runs))
    race = {"strategy": "race", "batch_sizes": [32, 64], "training_s": list(planned_s)}
    study = make_study(*trials, search=make_search(**race, base_batch_size=32))
    decision, table = study.decide(), study.table().set_index("batch size")
    seconds, speed = table["training time (s)"], speed_against(decision, *study.trials)
    assert speed.value == pytest.approx(seconds[64] / seconds[32]) == pytest.approx(1, rel=0.1)
    assert speed.low < 1 < speed.high < 2 * speed.low
    assert ("times_corrected" in codes(decision)) is (slow > 1)
    # Samples/s follow these times in tables, figures and exports, whatever the rate of a trial.
    rates = table["samples/s"]
    assert list(rates * seconds) == pytest.approx([2874, 2874])
    upper, _ = kbatch.plot_trials(study).figure.axes
    drawn = [list(line.get_ydata()) for line in upper.lines if len(line.get_xdata()) == 2]
    assert pytest.approx(list(rates)) in drawn
    once = timed(64, 400.0, factor=0.25)
    study = dataclasses.replace(study, trials=(*study.trials, once))
    exported, (*_, point) = study.to_dataframe()["samples_per_second"], pareto_points(study)[1]
    assert list(exported) == pytest.approx([rates[32], rates[64], rates[64]], rel=0.1)
    assert exported[1] == exported[2] and point[1].value in list(exported)
    (seen,) = study.runs_to_dataframe()["samples_per_second"][-1:]
    assert seen == pytest.approx(400)


def test_page_added_base_size_is_not_yours():
    trials = make_trial(32, 800), make_trial(64, 800, rate=3000.0)
    for added in (False, True):
        page, note = pages(*trials, base_added=added).page, "kbatch added batch size 32"
        assert (note in page.cost, "base_added" in [n.code for n in page.notes]) == (added, added)
        kept = pages(trials[0], make_trial(64, 900, rate=900.0), base_added=added)
        assert kept.page.sentences[0].startswith("Keep") is not added


def test_page_row_is_of_compared_rate():
    lost = make_trial(64, 800, factor=4.0, count=4)
    nan = dataclasses.replace(lost.executions[1], epochs=make_epochs([math.nan]), outcomes=None)
    lost = dataclasses.replace(lost, executions=(*lost.executions[:3], nan))
    decision = pages(make_trial(32, 800, factor=2), make_trial(64, 800, factor=2, rate=3000), lost)
    assert verdicts(decision) == ["as accurate, 3.0 times slower", "take"]


def test_note_batches_cut():
    cut = pages(make_trial(32, 800), make_trial(64, 800, rate=3000.0, micro_batch_size=16))
    assert cut.settings["micro_batch_size"] == 16
    assert "batches_cut" in codes(cut) and "batches_whole" not in codes(cut)


@pytest.mark.parametrize(("epochs", "asked", "noted"), [(1, 1, False), (4, 4, True), (4, 9, False)])
def test_note_still_rising(epochs, asked, noted):
    given = {"epochs": epochs, "epochs_asked": asked}
    decision = pages(make_trial(32, 800, **given), make_trial(64, 800, **given))
    rising = [note.values for note in decision.notes if note.code == "still_rising"]
    assert [(v["gain"], v["last"]) for v in rising] == [("0.020", "epoch")] * noted


def test_note_failure_rate():
    trials = make_trial(32, 800), make_trial(64, 800, rate=2000.0)
    near, far = pages(*trials, make_diverged(128)), pages(*trials, make_diverged(16))
    assert near.batch_size == far.batch_size == 64
    (note,) = [n for n in near.notes if n.code == "failure_rate"]
    assert (note.values["rate"], note.values["how"]) == ("63 %", "diverged")
    assert "failure_rate" not in codes(far)
    # A failure at another rate does not count.
    other = dataclasses.replace(make_diverged(128), hyperparameters={FACTOR_NAME: 4.0})
    assert "failure_rate" not in codes(pages(*trials, other))


def any_trial(rng, size, factor, objective, common):
    """A trial of a random study. Its runs end in any way, and its records may lack values."""
    sign = 1 if objective.direction == "max" else -1
    quality = 0.9 - common["step"] * abs(np.log2(size / 64)) - 0.01 * abs(np.log2(factor))
    ended = rng.choice(list(P_ENDS), p=list(P_ENDS.values()))
    rate = factor * 1e-3 * (size / 32) ** 0.5
    scaling = LearningRateScaling("sqrt", size, 32, rate / 1e-3, rate)
    runs = []
    for seed in range(common["repeats"] if ended == "completed" else 1):
        value = sign * (quality if sign > 0 else 1.1 - quality) + rng.normal(0, common["noise"])
        values = sign * value + np.linspace(-0.02, 0.02, 12) + rng.normal(0, common["noise"], 12)
        blocks = Outcomes(objective.name, 1200, 100, "k", tuple(values.tolist()))
        own = {"seed": seed, "scaling": scaling, "rate": 50.0 * size**0.7}
        own |= {"status": ended} if ended in FAILURES or ended == "interrupted" else {}
        own |= {"learning_rate": rate, "plan": None if common["own_fit"] else 1}
        own |= {"status": "failed", "epochs": (NAN_EPOCH,)} if ended == "diverged" else {}
        if ended == "completed":
            (epoch,) = make_epochs([sign * value])
            metrics = epoch.metrics | {objective.name: float(sign * value)}
            epochs = make_epochs([0.5] * 3)
            own["epochs"] = tuple(dataclasses.replace(one, metrics=metrics) for one in epochs)
            own["outcomes"] = blocks if common["outcomes"] else None
            own |= {} if common["timed"] else {"window_examples": (), "train_s": None}
            own |= {} if common["timed"] else {"window_durations_s": (), "examples_seen": None}
        runs.append(make_execution(size, **own))
    if ended in ("short", "stopped_early"):
        runs = [make_execution(size, scaling=scaling, length=ended, epochs_asked=10)]
    values = {FACTOR_NAME: factor} if common["race"] else {}
    values |= {"units": int(rng.choice([8, 16]))} if common["units"] else {}
    names = {"trial_id": f"{size}-{factor}", "hyperparameters": values}
    return trial_of(size, *runs, objective=objective, **names)


def any_study(seed):
    rng = np.random.default_rng(seed)
    objective = OBJECTIVES[seed % len(OBJECTIVES)]
    common = {name: rng.random() < share for name, share in SHARES.items()}
    common["noise"] = float(rng.choice([1e-4, 3e-3, 2e-2]))
    common["repeats"] = int(rng.integers(1, 5))
    common["step"] = float(rng.choice([0, 2e-3, 2e-2]))
    sizes = sorted(rng.choice(SIZES, int(rng.integers(1, 7)), replace=False).tolist())
    trials = [
        any_trial(rng, size, factor, objective, common)
        for size in sizes
        for factor in ([1.0, 0.25, 4.0][: int(rng.integers(1, 4))] if common["race"] else [1.0])
    ]
    search = {"batch_sizes": sizes if rng.random() < 0.8 else list(SIZES), "base_batch_size": 32}
    search |= {"strategy": "race" if common["race"] else "grid"}
    search |= {"tolerance": float(rng.choice([0.005, 0.02]))} if rng.random() < 0.5 else {}
    return make_study(*trials, search=make_search(**search))


def numbers(text):
    """List the numbers of a text, without those in names such as "float16"."""
    return re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?(?![\w.]*\w)", text)


def number(text):
    return float(text.split(" ")[0].replace(",", ""))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_page_sentences_agree_with_table(first):
    for seed in range(first, first + 50):
        study = any_study(seed)
        decision = study.decide()
        page = decision.page
        # Columns of the printed table are two spaces apart, and titles have up to two lines.
        said, table = str(decision).split("\n\n")[:2]
        head = [column.title for column in shown_columns(frame_of(page.rows))]
        lines = (line.strip() for line in table.split("\n")[-len(page.rows) :])
        rows = [dict(zip(head, re.split(r" {2,}", line), strict=True)) for line in lines]
        shown = {row["batch size"]: row for row in rows}
        judged = next((n for n in head if n.endswith("(95 % interval)")), None)
        assert len(page.sentences) <= 3 and said.split("\n") == list(page.sentences), seed
        assert len(shown) == len(rows) == len({*study.search.settings["batch_sizes"]}), seed
        within = tolerance_text(decision.best, decision.tolerance)
        limits = [*numbers(within), f"{100 * decision.confidence:g}", "5"]
        for sentence in page.sentences:
            for one in numbers(sentence):
                assert one in (*numbers(table), *limits), (seed, one, sentence)
        certain = [line for line in page.sentences if line.startswith("Certain")]
        assert len(certain) == decision.certain, seed
        for sentence in page.sentences[1:] if decision.batch_size else ():
            covers = ", for the learning rates that were tried:"
            of_speed = study.trials[0].objective.name == "samples_per_second"
            assert (covers in sentence) == (sentence in certain and not of_speed), seed
            assert "learning rate" not in sentence.replace(covers, ""), seed
        taken = [row for row in rows if row["verdict"] == "take"]
        answers = [f"{decision.batch_size:,}"] if decision.batch_size else []
        assert [row["batch size"] for row in taken] == answers
        assert len({*codes(decision)}) <= len(decision.notes) == len({*decision.notes})
        assert f"Notes: {len(decision.notes)}" in page.cost or not decision.notes
        if not taken:
            assert decision.trial is None and not page.use
            continue
        sign = 1 if study.trials[0].objective.direction == "max" else -1
        for row in rows:
            if "short run" in row["verdict"] or "stopped early" in row["verdict"]:
                assert {row.get(judged), row.get("training time (s)")} <= {None, "n/a"}, seed
            verdict, by = row["verdict"], re.search(r" by ([\d.,e-]*\d)", row["verdict"])
            rates = {
                t.learning_rate for t in study.trials if f"{t.batch_size:,}" == row["batch size"]
            }
            blamed = re.match("less accurate|worse|diverged", verdict) and not of_speed
            named = f" at learning rate {row.get('learning rate')}" in verdict
            assert named == bool(blamed and len(rates) == 1), (seed, verdict)
            if "(best value)" in verdict:
                compared = [number(shown[f"{t.batch_size:,}"][judged]) for t in decision.trials]
                assert sign * number(row[judged]) == max(sign * one for one in compared), seed
            if by:
                worse = sign * (number(taken[0][judged]) - number(row[judged]))
                sign_of_words = 1 if re.match("less accurate|worse", verdict) else -1
                written = number(by[1]) * sign_of_words
                assert written == pytest.approx(worse, abs=2e-4, rel=0.01), (seed, verdict)
            if verdict.startswith(("as accurate", "as good")) and decision.certain:
                # The shown values differ by at most the tolerance.
                behind = sign * (number(taken[0][judged]) - number(row[judged]))
                assert abs(behind) <= decision.tolerance + 2e-4, (seed, verdict)
            ratio = re.search(r"(\S+) times (slower|as fast)", verdict)
            if "training time (s)" in row and (ratio or verdict.endswith("as fast")):
                times = [number(one["training time (s)"]) for one in (row, taken[0])]
                written = 1.0 if ratio is None else float(ratio[1])
                written = 1 / written if ratio and ratio[2] == "as fast" else written
                assert times[0] / times[1] == pytest.approx(written, rel=0.06), (seed, verdict)
        change = page.sentences[2] if len(page.sentences) > 2 else ""
        if change:
            base = shown["32"]["verdict"]
            for one, other in (("as fast", "slower"), ("slower", "as fast")):
                written = re.search(rf"(\S+) times {one}", change)
                expected = written and f"{written[1]} times {other}"
                assert expected is None or expected in base, (seed, change, base)
            by = re.search(r" by ([\d.,e-]*\d)", change)
            assert by is None or f" by {by[1]}" in base, (seed, change, base)
            assert ("not certain" in change) == ("not certain" in base), (seed, change, base)


def marks(panel):
    """The look and the place of each mark of a panel."""
    shown = []
    for line in panel.lines:
        if line.get_marker() not in (None, "None") and line.get_transform() == panel.transData:
            hollow = line.get_fillstyle() == "none" or line.get_markerfacecolor() == canvas.PAPER
            look = "grey" if line.get_color() == canvas.MUTED else ("full", "hollow")[hollow]
            look = "ring" if line.get_markersize() == 13 else look
            shown += [(look, *place) for place in zip(*line.get_data(), strict=True)]
    return shown


def among(places, others):
    return all(np.isclose(others, place).all(1).any() for place in places)


def check_figure(study, name, axes):
    """Check that a figure has the sizes, values, counts and names of the page."""
    decision, table, figure = study.decide(), study.table(), axes.get_figure(root=True)
    texts = [text.get_text() for text in figure.findobj(Text)]
    said = " ".join([*texts, *(str(panel.get_label()) for panel in figure.axes)])
    said = " ".join(said.replace("\N{NO-BREAK SPACE}", " ").split())
    shown = {panel: marks(panel) for panel in figure.axes}
    places = [[p for look, *p in shown[panel] if look in ("full", "hollow")] for panel in shown]
    rings = [place for each in shown.values() for look, *place in each if look == "ring"]
    collections = [one for panel in figure.axes for one in panel.collections]
    bars = any(one.get_segments() for one in collections if hasattr(one, "get_segments"))
    assert ("Bars:" in said) == bars
    assert not re.search(r"\b(executions?|None|nan)\b", said)
    assert pluralize(len(study.trials), "trial") in said
    for size, how in re.findall(r"Without a result: batch size ([\d,]+) \(([a-z ]+)\)", said):
        assert how in {t.outcome for t in study.trials if f"{t.batch_size:,}" == size}
    if name == "trials":
        judged = [n for n in table.columns if n.endswith("(95 % interval)")]
        columns = ["samples/s", *judged * (study.quality_metric == study.trials[0].objective)]
        for column, drawn in zip(columns, places, strict=False):
            if column in table:
                rows = table[["batch size", column]].dropna().to_numpy(float)
                assert among(drawn, rows)
                compared = {trial.batch_size for trial in decision.trials}
                assert compared & {*rows[:, 0]} <= {size for size, _ in drawn}
        assert ("Hollow:" in said) == any(m[0] == "hollow" for each in shown.values() for m in each)
        verb, size = (re.findall(r"(take|keep) batch size ([\d,]*\d)", said) or [(None, None)])[0]
        assert size == (decision.batch_size and f"{decision.batch_size:,}")
        assert (verb == "keep") == decision.page.sentences[0].startswith("Keep")
        assert all(place[0] == decision.batch_size for place in rings)
    if decision.trial and name in ("trials", "learning-rates"):
        sure = decision.certified or "had no other batch size" in decision.reason
        assert ("not certain" in said) != sure
    if name == "pareto":
        sign = study.quality_metric.sign
        for look, *own in shown[axes]:
            x, y = own[0], sign * own[1]
            beaten = [p for p in places[0] if p != own and p[0] >= x and sign * p[1] >= y]
            assert look == "grey" or (look == "hollow") == bool(beaten)
    if name == "learning-rates" and decision.trial and decision.learning_rate:
        assert len(rings) == 1 and among(rings, places[0])
    if name.startswith("learning-curves"):
        named = [t.get_text() for legend in figure.findobj(Legend) for t in legend.get_texts()]
        assert len({*named}) == len(named)
        assert {*named} <= {f"{size:,}" for size in table["batch size"]}


EVERY = pytest.param(range(200), marks=pytest.mark.slow)


@pytest.mark.parametrize("seeds", [range(1, 200, 30), EVERY])
def test_figures_and_tables_agree_with_page(seeds):
    for study in map(any_study, seeds):
        decision, runs, table = study.decide(), study.runs_table(), study.table()
        assert study.settings["searched"].startswith(pluralize(len(runs), "training run"))
        complete = runs[runs["ended"] == "complete"].groupby("trial").size()
        rows = {row["batch size"]: row for row in decision.page.rows}
        for trial in decision.trials:
            count = complete.get(trial.trial_id, 1)  # An answer may come from a short run.
            assert rows[trial.batch_size]["runs"] == count
        for _, row in table[table["verdict"] == "take"].iterrows():
            own = {n: v for n, v in rows[decision.batch_size].items() if v is not None}
            assert {n: row[n] for n in own} == own
        for note in decision.notes:
            for size in re.findall(r"batch sizes? ([\d,]*\d)", note):
                assert int(size.replace(",", "")) in {*rows, 32}
        for figure in study.figures():
            check_figure(study, figure.name, figure.draw(None))


def test_report_and_notebook_contain_page(tmp_path):
    study = any_study(2)
    *_, path = kbatch.write_report(study, tmp_path / "report.md")
    markdown = path.read_text().replace("\\", "")
    cell = html.unescape(re.sub(r"<.*?>", "", study._repr_html_()))
    for text in (markdown, cell.replace("\N{NO-BREAK SPACE}", " ")):
        for sentence in study.decide().page.sentences:
            assert sentence in text
        for column in shown_columns(study.table()):
            assert all(cell.replace("*", "") in text for cell in [column.title, *column.texts])


def test_study_texts_name_answer_of_page():
    study = make_study(make_trial(32, 800), make_trial(64, 805, rate=2000.0))
    assert study.decide() is study.decide()
    decision, (row,) = study.decide(), study.table().attrs["answer"]
    assert study.table()["batch size"][row] == decision.batch_size == 64
    assert study.answer == decision.page.sentences[0] and decision.reason in study.use
    assert "batch size 64" in named_label(study)
    assert study.notes == decision.notes


@pytest.mark.parametrize(
    ("same", "certain", "code"),
    [
        (("initial_weights", "first_order"), False, "to_be_certain"),
        (("initial_weights",), True, "same_start"),
        (("first_order",), True, "same_start"),
        ((), True, "rate_unchecked"),
    ],
)
def test_note_same_start_for_all_seeds(same, certain, code):
    trials = []
    for trial in (make_trial(32, 800), make_trial(64, 805, rate=2000.0)):
        own = ({n: "same" if n in same else str(seed) for n in BEGINS} for seed in range(3))
        pairs = zip(trial.executions, own, strict=True)
        runs = tuple(dataclasses.replace(run, **begins) for run, begins in pairs)
        trials.append(dataclasses.replace(trial, executions=runs))
    decision = pages(*trials)
    assert decision.certain == certain
    assert codes(decision)[0] == code
    assert ("count as one" in decision.reason) is not certain


def test_race_figures_show_judged_values():
    trials = [make_trial(size, 800, factor=2.0, count=5) for size in (32, 64)]
    study = make_study(*trials, search=make_search(base_batch_size=32, strategy="race"))
    judged = study.table().set_index("batch size")["judged (95 % interval)"]
    assert judged[64] == pytest.approx(np.mean(study.trials[1].judged_values))
    for panel, shown in zip(
        kbatch.plot_trials(study).figure.axes, (study.table()["samples/s"], judged), strict=True
    ):
        assert any(list(line.get_ydata()) == pytest.approx(list(shown)) for line in panel.lines)
        # The ring marks the answer.
        (ring,) = [line for line in panel.lines if line.get_markersize() == 13]
        assert ring.get_ydata()[0] == pytest.approx(list(shown)[study.table().attrs["answer"][0]])
    _, points = pareto_points(study)
    shown = {trial.batch_size: value.value for trial, _, value, _ in points}
    assert shown == pytest.approx(judged.to_dict())
    once = make_trial(64, 100, factor=4.0, count=1)  # It is better, but its rate was not repeated.
    study = dataclasses.replace(study, trials=(*study.trials, once))
    curves = {trial.batch_size: curve for trial, curve in learning_curves(study)[1]}
    ends = {size: curve[-1][1].value for size, curve in curves.items()}
    assert ends == pytest.approx(judged.to_dict())
