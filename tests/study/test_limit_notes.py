"""Notes on the limits of a study: when each appears, and when it does not."""

import dataclasses

import pytest
from records_factory import (
    make_epochs,
    make_execution,
    make_search,
    make_study,
    make_trial,
    with_moments,
)

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.records.notes import Note
from kbatch.records.training_run import Outcomes
from kbatch.study.trial import Objective


def repeated(size, accuracy, rate, wait_share=0.0, device=None):
    """A trial of three runs with slightly different accuracies and speeds."""
    runs = []
    for seed, shift in enumerate((-0.001, 0.0, 0.001)):
        epochs = make_epochs((0.5, accuracy + shift), train_s=1.0, data_wait_s=wait_share)
        own = {"rate": rate * (1 + shift), "device": device, "seed": seed, "epochs": epochs}
        runs.append(make_execution(size, **own))
    return make_trial(size, *runs)


# Notes about the answer and its use, which are no limits.
OTHERS = ("to_be_certain", "rate_unchecked", "also_set", "batches_whole", "batches_cut")


def limits(result):
    return [note for note in result.notes if note.code not in OTHERS]


def names(*trials):
    return [note.code for note in limits(make_study(*trials))]


@pytest.mark.parametrize(("name", "noted"), [("accuracy", True), ("val_accuracy", False)])
def test_note_objective_of_training(name, noted):
    metrics = {"accuracy": 0.9, "val_accuracy": 0.8}
    epochs = [dataclasses.replace(epoch, metrics=metrics) for epoch in make_epochs([0.9] * 2)]
    trial = make_trial(32, epochs=tuple(epochs), objective=Objective(name, "max"))
    assert ("objective_of_training" in {note.code for note in make_study(trial).notes}) == noted


@pytest.mark.parametrize(("size", "shown"), [(32, True), (64, False)])
def test_note_most_common_class_of_the_answer_only(size, shown):
    note = Note.of("most_common_class", words="validation accuracy", value="0.96", share="0.97")
    notes = {32: (), 64: ()} | {size: (note,)}
    trials = [make_trial(n, accuracies=(32 / n,) * 2, notes=notes[n]) for n in (32, 64)]
    assert ("most_common_class" in names(*trials)) == shown


def test_note_input_binds_hides_other_limits():
    waiting = repeated(64, 0.98, 1000, wait_share=0.3)
    assert names(waiting, repeated(128, 0.9, 1010)) == ["input_binds"]
    (note,) = limits(make_study(waiting))
    assert note.values == {"when": "up to 30 % of its time at batch size 64"}
    brief = repeated(64, 0.98, 1000, wait_share=0.1)
    assert names(brief, repeated(128, 0.9, 2000)) == ["updates_bind"]


def test_note_devices_differ_hides_other_limits():
    faster = repeated(128, 0.9, 2000, device="H100")
    assert names(repeated(64, 0.98, 1000), faster) == ["updates_bind"]
    assert names(repeated(64, 0.98, 1000, device="A100"), faster) == ["devices_differ"]


def test_note_memory_binds_larger_sizes_out_of_memory():
    out = make_trial(128, status="out_of_memory")
    assert names(repeated(32, 0.9, 900), repeated(64, 0.98, 1000), out) == ["memory_binds"]
    (limit,) = limits(make_study(repeated(64, 0.98, 1000), out))
    assert limit.code == "memory_binds" and "128" in limit.values["how"]
    assert names(repeated(64, 0.98, 1000), out, make_trial(256, status="failed")) == []


def test_note_memory_binds_cut_batches():
    cut = {"micro_batch_size": 43, "most_in_memory": 60}
    (limit,) = limits(make_study(make_trial(128, **cut)))
    assert limit.code == "memory_binds" and "60" in limit and "43" in limit
    # The micro-batch was chosen for speed, was given, or is the whole batch.
    for other in ({"micro_batch_size": 32}, {"most_in_memory": None}, {"micro_batch_size": 128}):
        assert names(make_trial(128, **(cut | other))) == []
    # Each of two replicas has half of the batch.
    assert names(make_trial(128, **cut, replicas=2)) == []
    assert names(make_trial(240, **cut | {"micro_batch_size": 60}, replicas=2)) == ["memory_binds"]


def test_note_updates_bind():
    best, larger = repeated(64, 0.98, 1000), repeated(128, 0.9, 1900)
    (limit,) = limits(make_study(best, larger))
    assert (limit.code, limit.values["gain"]) == ("updates_bind", "1.9")
    assert limit.values["words"] == "validation accuracy"
    # The larger size may be within the tolerance.
    runs = (dataclasses.replace(run, seed=2 - run.seed) for run in larger.executions)
    near = make_study(best, make_trial(128, *runs)).decide(0.04)
    assert (near.batch_size, near.worse, limits(near)) == (64, (), [])
    # It gains too little speed.
    assert names(best, repeated(128, 0.9, 1050)) == []
    # It made as many updates, with `steps_per_epoch`.
    runs = (dataclasses.replace(r, updates=best.last.updates) for r in larger.executions)
    assert names(best, make_trial(128, *runs)) == []


def test_note_noise_binds():
    def noisy(size, variance):
        epochs = with_moments(make_epochs([0.98] * 8, examples=64), [(variance, 1.0)] * 8)
        return make_trial(size, *(make_execution(size, seed=n, epochs=epochs) for n in range(3)))

    assert names(noisy(64, 10.0)) == ["noise_binds"]
    assert names(noisy(64, 100.0)) == []


def lagging(
    *, training=0.88, validation=0.20, updates=40, momenta=(0.9, 0.99), scaled=True, averages=False
):
    made = {"batch_norm_momentum": momenta, "ema_momentum": (0.995,)}
    scaling = LearningRateScaling(None, 256, 256, 1.0, 0.1, made=made)
    (epoch,) = make_epochs((validation,))
    epoch.metrics["accuracy"] = training
    trial = make_trial(
        256,
        epochs=(epoch,),
        updates=updates,
        scaling=scaling if scaled else None,
        averages_validated=averages,
    )
    notes = make_study(trial, make_trial(32)).notes
    return [note.values for note in notes if note.code == "lagging_statistics"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {"sizes": "batch size 256", "at": "256", "training": "0.880", "validation": "0.200"}),
        ({}, {"updates": "40 updates", "memory": "100"}),
        ({"averages": True, "updates": 400}, {"updates": "400 updates", "memory": "200"}),
        ({"averages": True, "updates": 400}, {"cure": "`ema_momentum`"}),
        ({"validation": 0.80}, None),
        ({"updates": 500}, None),  # The averages of the weights were not validated.
        ({"momenta": (0.5,)}, None),
        ({"momenta": (1.0,)}, None),
        ({"scaled": False}, None),
    ],
)
def test_note_lagging_statistics(changed, expected):
    notes = lagging(**changed)
    assert len(notes) == (expected is not None)
    assert not expected or expected.items() <= notes[0].items()


BY_CALLBACK = {
    # For each run: the rate after the rule, of the first update, and of each epoch.
    "absolute": ([(0.1, 0.01, 0.01, 0.005), (0.2, 0.01, 0.01, 0.005)], True),
    "absolute by batch": ([(0.1, 1e-4, 0.01, 0.003), (0.2, 1e-4, 0.02, 0.007)], True),
    "absolute after an update": ([(0.1, 0.1, 0.01, 0.005), (0.2, 0.2, 0.01, 0.005)], True),
    "absolute after an epoch": ([(0.1, 0.1, 0.1, 0.01), (0.2, 0.2, 0.2, 0.01)], True),
    "one rate, and another one": ([(0.1, 0.01, 0.005), (0.1, 0.01, 0.005)], True),
    "one rate that trained": ([(0.1, 0.1, 0.05), (0.1, 0.1, 0.05)], False),
    "a factor": ([(0.1, 0.09, 0.09, 0.081), (0.2, 0.18, 0.18, 0.162)], False),
    "a factor from 0": ([(0.1, 0.0, 0.05, 0.1), (0.2, 0.0, 0.1, 0.2)], False),
    "factors by progress": ([(0.1, 0.1, 0.1, 0.05, 0.05), (0.2, 0.2, 0.2, 0.2, 0.05)], False),
    "no callback": ([(0.1, 0.1, 0.1), (0.2, 0.2, 0.2)], False),
}


@pytest.mark.parametrize("form", BY_CALLBACK)
def test_note_rates_by_callback(form):
    runs, noted = BY_CALLBACK[form]
    trials = []
    for size, (given, first, *ends) in zip((32, 128), runs, strict=True):
        scaling = LearningRateScaling("sqrt", size, 32, given / 0.1, given)
        epochs = tuple(
            dataclasses.replace(epoch, learning_rate=rate)
            for epoch, rate in zip(make_epochs([0.9] * len(ends)), ends, strict=True)
        )
        setters = () if form == "no callback" else ("OneCycle",)
        rates = {"learning_rate": first, "rate_callbacks": setters, "scaling": scaling}
        trials.append(make_trial(size, epochs=epochs, **rates))
    decision = make_study(*trials).decide()
    notes = [note for note in decision.notes if note.code == "rates_by_callback"]
    assert [note.values["who"] for note in notes] == ["OneCycle"] * noted
    assert (decision.learning_rate is None) == noted
    assert not noted or "learning_rate" not in decision.settings
    codes = {note.code for note in decision.notes}
    assert ("rate_unchecked" in codes) == (not noted)
    rates = [row["learning rate"] for row in decision.page.rows if row["runs"]]
    assert rates == ([None, None] if noted else [runs[0][0], runs[1][0]])
    assert ("learning rate" in decision.page.sentences[0]) == (not noted)


@pytest.mark.parametrize(
    ("asked", "rule", "ratio", "noted"),
    [
        ("auto", None, 1.0, True),
        ("auto", "sqrt", 2.0, False),
        ("auto", None, 2.0, False),  # The build function scales the rate.
        (None, None, 1.0, False),
    ],
)
def test_note_no_rule(asked, rule, ratio, noted):
    trials = [
        make_trial(size, scaling=LearningRateScaling(rule, size, 32, r, 0.1))
        for size, r in ((32, 1.0), (128, ratio))
    ]
    study = make_study(*trials, search=make_search(learning_rate_scaling=asked))
    notes = [note for note in study.notes if note.code == "no_rule"]
    assert [note.values["optimizer"] for note in notes] == ["Adam"] * noted


def test_note_blocks_lack_a_class():
    values = {"metric": "val_accuracy", "values": (0.9, 0.8), "key": "k", "examples": 40}
    for lacking, expected in ((0, []), (1, ["blocks_lack_a_class"])):
        outcomes = Outcomes(**values, step=0.05, lacking_blocks=lacking)
        assert names(make_trial(64, outcomes=outcomes)) == expected


def ended(accuracies, rate, *, sizes=(32, 64), searched=None, most=None):
    """The notes on the end of the range of two sizes. The first size trains 1,000 samples/s."""
    trials = [*map(repeated, sizes, accuracies, (1000, rate))]
    runs = [dataclasses.replace(run, most_in_memory=most) for run in trials[1].executions]
    search = make_search(batch_sizes=[*(searched or sizes)])
    notes = make_study(trials[0], make_trial(sizes[1], *runs), search=search).notes
    values = [note.values for note in notes if note.code == "end_of_range"]
    return [(found["end"], found["may"], found["next"]) for found in values]


def test_note_end_of_range():
    equal, falling = (0.95, 0.95), (0.95, 0.9)
    assert ended(equal, 1800) == [("largest", "faster", 128)]
    assert ended((0.9, 0.95), 1000) == [("largest", "better", 128)]
    assert ended(falling, 1800) == [("smallest", "better", 16)]
    assert ended(falling, 1800, sizes=(1, 2)) == []
    # Twice the size would gain 4 %, does not fit in memory, or has too few batches in an epoch.
    assert ended(equal, 1080) == ended(equal, 1800, most=100) == []
    assert ended(equal, 1800, sizes=(64, 128)) == []
    assert ended(equal, 1800, searched=(16, 32, 64, 128)) == []
