import dataclasses

import pytest
from records_factory import (
    make_diverged,
    make_environment,
    make_epochs,
    make_execution,
    make_search,
    make_study,
    make_trial,
)

from kbatch.page.numbers import one_line
from kbatch.records.notes import Note
from kbatch.records.training_run import EpochRecord
from kbatch.study.caveats import caveats
from kbatch.study.report import study_section
from kbatch.study.study import Study
from kbatch.study.table import trial_table
from kbatch.study.trial import Objective


def repeated(batch_size, *accuracies, rate=1000):
    return make_trial(
        batch_size,
        *(
            make_execution(batch_size, accuracies=(a,), rate=rate, seed=seed)
            for seed, a in enumerate(accuracies)
        ),
    )


def page(study):
    return study.decide().page


def caveat(study, words):
    return [c.text for c in caveats(study) if words in c.text]


def test_the_page_is_at_most_fifteen_lines_with_answer_table_and_search():
    page = make_study().decide().page
    assert page.headline == (
        "Take batch size 64 with learning rate 0.001, for 2 epochs of 1,437 examples."
    )
    assert page.search == "7 trainings of 7 batch sizes (1 out of memory)."
    sizes = [line.split()[0] for line in page.table[1:]]
    assert sizes == ["16", "32", "64", "128", "256", "512", "4,096"]
    many = make_study(*(repeated(2**k, 0.9, 0.9, 0.9) for k in range(12)), make_diverged(2**13))
    assert len(str(many.decide()).splitlines()) <= 15
    assert len(str(make_study().decide()).splitlines()) <= 15


def test_the_policy_is_named_where_there_are_several():
    study = make_study(
        make_trial(16, dtype_policy="float32"), make_trial(32, accuracies=(0.99,), rate=9000)
    )
    assert page(study).headline.startswith("Take batch size 32 (mixed_float16) with")


def test_the_hyperparameters_that_differ_are_named():
    study = make_study(
        make_trial(16, hyperparameters={"units": 1600, "drop": 0.5}, accuracies=(0.99,)),
        make_trial(32, hyperparameters={"units": 8, "drop": 0.5}, rate=2000),
        make_trial(64, hyperparameters={"units": 8, "drop": 0.5}, status="failed"),
    )
    assert page(study).headline.startswith("Take batch size 16 (units=1600) with")
    assert caveat(study, "Batch size 64 (units=8, mixed_float16) has no result") != []


def test_a_tie_is_told_with_how_it_was_decided():
    study = make_study(
        *(
            make_trial(size, accuracies=(1.0,), hyperparameters={"units": u}, trial_id=f"{u}")
            for size, u in ((64, 8), (16, 9), (32, 10))
        ),
        make_trial(8, accuracies=(0.9,), hyperparameters={"units": 8}),
    )
    told = "Batch size 32 (units=10) and 64 (units=8) had the same value"
    assert page(study).headline.startswith("Take batch size 16 (units=9)")
    assert told in page(study).search
    assert "same value" not in page(make_study()).search


def test_two_executions_are_too_few_for_an_interval_of_one_trial():
    study = make_study(repeated(16, 0.9, 0.91), repeated(32, 0.89, 0.92))
    two = "Two executions have a mean and no interval."
    assert two in trial_table(study).footnote
    assert two not in trial_table(make_study(repeated(16, 0.9, 0.9, 0.9))).footnote


def test_a_diverged_trial_is_told_once():
    study = make_study(make_trial(16), make_diverged(32, "diverged: loss nan"))
    assert caveat(study, "Batch size 32") == [
        "Batch size 32 (mixed_float16) has no result: diverged: loss nan"
    ]


@pytest.mark.parametrize(
    ("trials", "advice"),
    [
        ((make_trial(16, status="out_of_memory"),), "smaller `micro_batch_size`, which needs"),
        ((make_trial(16, status="failed"),), "Read the failures below"),
        ((make_diverged(16),), "smaller learning rate"),
        ((make_trial(16, status="interrupted"),), "start it again"),
    ],
)
def test_without_a_completed_trial_the_advice_follows_the_cause(trials, advice):
    found = page(make_study(*trials)).certainty
    assert advice in found
    assert ("micro_batch_size" in found) is (trials[0].status == "out_of_memory")


@pytest.mark.parametrize(
    ("name", "metrics", "advice"),
    [
        ("val_auc", {"loss": 1.0}, "not among the metrics: loss. Give `validation_data`"),
        ("val_auc", {"val_loss": 1.0}, "not among the metrics: val_loss. Compile the model"),
        ("val_auc", {"val_auc": None}, "val_auc was not finite in any epoch"),
        ("auc", {}, "not among the metrics: none. Compile the model"),
        ("samples_per_second", {"loss": 1.0}, "train longer"),
    ],
)
def test_without_the_objective_the_advice_names_the_metrics(name, metrics, advice):
    epoch = EpochRecord(0, metrics, 64, 1, 0.1, None)
    untimed = {"window_examples": (), "window_durations_s": ()}
    trial = make_trial(64, objective=Objective(name, "max"), epochs=(epoch,), **untimed)
    assert advice in page(make_study(trial)).certainty
    assert "memory" not in page(make_study(trial)).certainty


def test_without_a_completed_trial_no_size_is_named():
    study = make_study(make_trial(64, status="failed"), make_trial(128, status="out_of_memory"))
    assert page(study).headline == (
        "No batch size can be named: none of 2 trials completed (1 failed and 1 out of memory)."
    )


def test_the_only_completed_trial_was_not_compared():
    study = make_study(make_trial(64), make_trial(128, status="failed"))
    assert "nothing was compared" in page(study).certainty


def test_failures_problems_and_notes_are_told_with_their_batch_size():
    study = make_study(
        make_trial(16, notes=(Note.of("resumed", epoch=3), Note.of("loss_a_row"))),
        make_trial(32, notes=(Note.of("resumed", epoch=3),), status="failed"),
        problems=("trial_9/kbatch.json is damaged",),
    )
    assert caveat(study, "trial_9/kbatch.json") != []
    assert "the loss is not finite" in caveat(study, "Batch size 32 (mixed_float16)")[0]
    (own,) = caveat(study, "`loss` is a sum over the batch")
    assert own.startswith("At batch size 16: `loss`")
    (shared,) = caveat(study, "from epoch 3 of another trial")
    assert shared.startswith("It went on")


def test_a_single_execution_is_told():
    assert "`executions_per_trial=3`" in page(make_study()).certainty
    repeats = make_study(repeated(16, 0.9, 0.9), repeated(32, 0.9, 0.9))
    assert "`executions_per_trial=3`" not in page(repeats).certainty


def test_a_long_failure_becomes_one_short_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("word " * 500)) == 300


def test_the_content_says_how_to_reproduce_and_where_it_was_measured():
    content = study_section(make_study())
    assert content.command == "python examples/digits.py --seed 0"
    assert ("seed", "0") in content.settings
    assert ("batch_sizes", "[16, 32, 64, 128]") in content.settings
    assert ("seeds of the executions", "0") in content.settings
    assert ("training data", "1,437 examples an epoch") in content.settings
    assert ("Host memory", "64.0 GiB") in content.environment
    assert ("tensorflow", "2.21.0") in content.environment


def test_without_the_search_file_there_is_still_a_report():
    content = study_section(Study("digits", make_study().trials))
    assert (content.command, content.environment) == (None, ())


def test_the_number_of_training_examples_is_that_of_the_first_epoch():
    study = make_study(
        make_trial(16, epochs=make_epochs((0.9, 0.9), examples=100)),
        make_trial(32, epochs=make_epochs((0.9, 0.9), examples=96)),
    )
    content = study_section(study)
    assert ("training data", "96 to 100 examples an epoch") in content.settings
    assert "2 epochs of 96 to 100 examples" in content.conditions
    failed = study_section(make_study(make_trial(16, status="failed")))
    assert ("training data", "n/a (no trial completed)") in failed.settings


def test_what_the_system_does_not_tell_is_not_available():
    environment = make_environment(memory_bytes=None, load_average=None)
    search = dataclasses.replace(make_search(), environment=environment)
    facts = dict(study_section(make_study(search=search)).environment)
    assert facts["Host memory"] == "n/a (the system does not tell)"
    assert facts["Load average at the start"] == "n/a (the system does not tell)"


def test_an_epoch_without_the_metric_leaves_a_trial_without_the_objective():
    objective = Objective("val_auc", "max")
    study = make_study(make_trial(64, objective=objective, epochs=make_epochs((0.9,))))
    assert "no completed trial has the objective val_auc" in page(study).headline


def beside(**changed):
    """A trial that is so, and a usual one."""
    return make_study(make_trial(16, **changed), make_trial(32))


def windows(*durations_s, each=100):
    examples = (each,) * len(durations_s)
    return beside(window_examples=examples, window_durations_s=durations_s)


def waiting(share):
    return beside(epochs=make_epochs((0.9, 0.97), train_s=1.0, data_wait_s=share))


def measured_under(**environment):
    search = dataclasses.replace(make_search(), environment=make_environment(**environment))
    return make_study(search=search)


@pytest.mark.parametrize(
    ("study", "words", "count"),
    [
        (windows(0.1, 0.1, 0.2, 0.2, each=10), "not stable at batch size 16", 1),
        (windows(0.1, 0.1, 0.1, 0.1, each=10), "not stable at batch size 16", 0),
        (windows(*[0.1] * 8, 0.3), "the timing windows: 818 against 1,000.", 1),
        (windows(*[0.1] * 8, 0.18), "far longer than most at batch size 16.", 0),
        (waiting(0.21), "input pipeline", 1),
        (waiting(0.19), "input pipeline", 0),
        (measured_under(load_average=8.1), "load average", 1),
        (measured_under(load_average=8.0), "load average", 0),
        (measured_under(load_average=None), "load average", 0),
        (beside(batch_size_seen=10), "read this trial as batch size 10", 1),
        (make_study(), " was asked for", 0),
        (make_study(), "batch size 512 made 6 updates on 2,874 examples", 1),
        (make_study(make_trial(64)), "Equal-epochs", 0),
        (beside(accuracies=(0.9,)), "Equal-epochs", 0),
        (beside(accuracies=(0.9,)), "executions had 1 to 2 epochs", 1),
    ],
)
def test_a_caveat_is_told_where_it_is_so(study, words, count):
    assert len(caveat(study, words)) == count
