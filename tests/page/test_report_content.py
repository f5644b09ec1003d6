from pathlib import Path

import pytest
from records_factory import make_diverged, make_execution, make_study, make_trial

from kbatch.page.document import markdown_files
from kbatch.records.notes import Note
from kbatch.study.limits import caveats


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


def codes(study):
    return [note.code for note in caveats(study.trials, study.problems)]


def test_the_page_of_many_sizes_is_at_most_fifteen_lines():
    many = make_study(*(repeated(2**k, 0.9, 0.9, 0.9) for k in range(12)), make_diverged(2**13))
    assert len(str(many.decide()).splitlines()) <= 15
    assert make_study().decide().page.search == "7 trainings of 7 batch sizes (1 out of memory)."


@pytest.mark.parametrize(
    ("trials", "advice"),
    [
        ((make_trial(16, status="out_of_memory"),), "micro_batch_size"),
        ((make_trial(16, status="failed"),), "failed"),
        ((make_diverged(16),), "smaller learning rate"),
    ],
)
def test_without_a_completed_trial_the_advice_follows_the_cause(trials, advice):
    found = page(make_study(*trials)).certainty
    assert advice in found
    assert ("micro_batch_size" in found) is (trials[0].status == "out_of_memory")


def test_problems_and_notes_of_trials_are_notes_of_the_study():
    study = make_study(
        make_trial(16, notes=(Note.of("own_step_whole", size=8),)),
        make_trial(32, notes=(Note.of("own_step_whole", size=8),)),
        problems=("trial_9/kbatch.json is damaged", "another one"),
    )
    assert codes(study) == ["left_out", "own_step_whole"]
    assert study.notes[0].values["first"] == "trial_9/kbatch.json is damaged (1 more)"


def test_the_page_says_how_to_reproduce_and_where_it_was_measured():
    study = make_study()
    assert study.settings["batch_sizes"] == "[16, 32, 64, 128]"
    assert study.settings["seed"] == study.settings["seeds of the executions"] == "0"
    assert study.settings["training data"] == "1,437 examples an epoch"
    text = markdown_files([study], Path("report.md"))[Path("report.md")].decode()
    assert "sh\npython examples/digits.py --seed 0\n" in text
    assert "| Host memory | 64.0 GiB |" in text and "| tensorflow | 2.21.0 |" in text


def beside(**changed):
    """A trial that is so, and a usual one."""
    return make_study(make_trial(16, **changed), make_trial(32))


@pytest.mark.parametrize(
    ("study", "code", "told"),
    [
        (beside(batch_size_seen=10), "another_batch_size", True),
        (beside(workers_on_device=2), "shared_device", True),
        (beside(device="A"), "devices_differ", False),
    ],
)
def test_a_caveat_is_told_where_it_is_so(study, code, told):
    assert (code in codes(study)) == told
    assert codes(make_study()) == []
