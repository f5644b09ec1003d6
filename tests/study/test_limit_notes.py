"""What limits the conclusions from a study: each note where it is so, and none where it is not."""

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
from kbatch.records.training_run import Outcomes
from kbatch.study.trial import Objective


def repeated(size, accuracy, rate, wait_share=0.0, device=None):
    """A trial of three executions whose accuracies and rates scatter a little."""
    runs = []
    for seed, shift in enumerate((-0.001, 0.0, 0.001)):
        epochs = make_epochs((0.5, accuracy + shift), train_s=1.0, data_wait_s=wait_share)
        own = {"rate": rate * (1 + shift), "device": device, "seed": seed, "epochs": epochs}
        runs.append(make_execution(size, **own))
    return make_trial(size, *runs)


# What is said of the answer and its use, and not of a limit.
OTHERS = ("to_be_certain", "rate_unchecked", "also_set", "batches_whole", "batches_cut")


def limits(result):
    return [note for note in result.notes if note.code not in OTHERS]


def names(*trials):
    return [note.code for note in limits(make_study(*trials))]


@pytest.mark.parametrize(("name", "said"), [("accuracy", True), ("val_accuracy", False)])
def test_notes_name_an_objective_of_training_beside_validation_data(name, said):
    metrics = {"accuracy": 0.9, "val_accuracy": 0.8}
    epochs = [dataclasses.replace(one, metrics=metrics) for one in make_epochs([0.9] * 2)]
    trial = make_trial(32, epochs=tuple(epochs), objective=Objective(name, "max"))
    notes = make_study(trial).notes
    assert ("objective_of_training" in {note.code for note in notes}) == said


def test_waiting_for_data_is_the_only_limit_that_it_lets_be_seen():
    waiting = repeated(64, 0.98, 1000, wait_share=0.3)
    assert names(waiting, repeated(128, 0.9, 1010)) == ["input_binds"]
    assert limits(make_study(waiting))[0].values == {
        "when": "up to 30 % of its time at batch size 64"
    }
    assert names(repeated(64, 0.98, 1000, wait_share=0.1), repeated(128, 0.9, 2000)) == [
        "updates_bind"
    ]


def test_a_trial_on_another_device_tells_nothing_of_this_one():
    faster, found = repeated(128, 0.9, 2000, device="H100"), repeated(64, 0.98, 1000)
    assert names(found, faster) == ["updates_bind"]
    assert names(repeated(64, 0.98, 1000, device="A100"), faster) == ["devices_differ"]


def test_memory_binds_where_every_larger_size_ran_out():
    out = make_trial(128, status="out_of_memory")
    assert names(repeated(32, 0.9, 900), repeated(64, 0.98, 1000), out) == ["memory_binds"]
    (limit,) = limits(make_study(repeated(64, 0.98, 1000), out))
    assert limit.code == "memory_binds" and "128" in limit.values["how"]
    assert names(repeated(64, 0.98, 1000), out, make_trial(256, status="failed")) == []


def test_memory_binds_where_it_cut_the_batch():
    cut = {"micro_batch_size": 43, "most_in_memory": 60}
    (limit,) = limits(make_study(make_trial(128, **cut)))
    assert limit.code == "memory_binds" and "60" in limit and "43" in limit
    # Chosen since it is faster, given, or the whole batch: memory has no say.
    for other in ({"micro_batch_size": 32}, {"most_in_memory": None}, {"micro_batch_size": 128}):
        assert names(make_trial(128, **(cut | other))) == []
    # Two replicas have half of the batch each.
    assert names(make_trial(128, **cut, replicas=2)) == []
    assert names(make_trial(240, **cut | {"micro_batch_size": 60}, replicas=2)) == ["memory_binds"]


def test_updates_bind_where_larger_batches_were_faster_and_learnt_less():
    best, many = repeated(64, 0.98, 1000), repeated(128, 0.9, 1900)
    (limit,) = limits(make_study(best, many))
    assert (limit.code, limit.values["gain"]) == ("updates_bind", "1.9")
    assert limit.values["words"] == "validation accuracy"
    # It may lie within the tolerance.
    runs = (dataclasses.replace(run, seed=2 - run.seed) for run in many.executions)
    near = make_study(best, make_trial(128, *runs)).decide(0.04)
    assert (near.batch_size, near.worse, limits(near)) == (64, (), [])
    # A gain that is no gain is given up for nothing.
    assert names(best, repeated(128, 0.9, 1050)) == []
    # As many updates, with `steps_per_epoch`.
    pairs = zip(many.executions, best.executions, strict=True)
    runs = (dataclasses.replace(run, updates=one.updates) for run, one in pairs)
    assert names(best, make_trial(128, *runs)) == []


def test_noise_binds_where_the_batch_lies_above_the_noise_scale():
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
    found = make_study(trial, make_trial(32)).decide().notes
    return [note.values for note in found if note.code == "lagging_statistics"]


def test_the_note_says_how_many_updates_came_and_over_how_many_statistics_average():
    (values,) = lagging()
    assert (values["sizes"], values["at"]) == ("batch size 256", "256")
    assert (values["training"], values["validation"]) == ("0.880", "0.200")
    assert (values["updates"], values["memory"]) == ("40 updates", "100")


def test_averages_of_weights_that_were_validated_lag_too():
    (values,) = lagging(averages=True, updates=400)
    assert (values["updates"], values["memory"]) == ("400 updates", "200")
    assert values["cure"] == "`ema_momentum`"


@pytest.mark.parametrize(
    "changed",
    [
        {"validation": 0.80},
        {"updates": 500},  # The averages were not validated.
        {"momenta": (0.5,)},
        {"momenta": (1.0,)},
        {"scaled": False},
    ],
)
def test_without_a_gap_or_a_lag_there_is_none(changed):
    assert lagging(**changed) == []


BY_CALLBACK = {
    # The rate that each run was given, then those of its first update and of each epoch.
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
def test_callbacks_that_set_rates_of_their_own_are_named_and_no_rate_is(form):
    runs, told = BY_CALLBACK[form]
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
    study = make_study(*trials)
    found = [note for note in study.notes if note.code == "rates_by_callback"]
    decision = study.decide()
    assert [note.values["who"] for note in found] == ["OneCycle"] * told
    assert (decision.learning_rate is None) == told
    assert not told or "learning_rate" not in decision.settings
    codes = {note.code for note in decision.notes}
    assert ("rate_unchecked" in codes) == (not told)
    rates = [row["learning rate"] for row in decision.page.rows if row["runs"]]
    assert rates == ([None, None] if told else [runs[0][0], runs[1][0]])
    assert ("learning rate" in decision.page.sentences[0]) == (not told)


@pytest.mark.parametrize(
    ("asked", "rule", "ratio", "noted"),
    [
        ("auto", None, 1.0, True),
        ("auto", "sqrt", 2.0, False),
        ("auto", None, 2.0, False),  # The build function lets the rate follow the size.
        (None, None, 1.0, False),
    ],
)
def test_an_optimizer_without_a_rule_is_named(asked, rule, ratio, noted):
    settings = make_search().settings | {"learning_rate_scaling": asked}
    search = dataclasses.replace(make_search(), settings=settings)
    trials = [
        make_trial(size, scaling=LearningRateScaling(rule, size, 32, one, 0.1))
        for size, one in ((32, 1.0), (128, ratio))
    ]
    notes = [one for one in make_study(*trials, search=search).notes if one.code == "no_rule"]
    assert [note.values["optimizer"] for note in notes] == ["Adam"] * noted


def test_blocks_of_examples_that_lack_a_class_get_a_note():
    values = {"metric": "val_accuracy", "values": (0.9, 0.8), "key": "k", "examples": 40}
    for lacking, expected in ((0, []), (1, ["blocks_lack_a_class"])):
        outcomes = Outcomes(**values, step=0.05, lacking_blocks=lacking)
        assert names(make_trial(64, outcomes=outcomes)) == expected
