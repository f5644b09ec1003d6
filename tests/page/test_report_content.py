import pytest
from records_factory import make_diverged, make_study, make_trial

from kbatch.records.notes import Note


def codes(study):
    return [note.code for note in study.notes]


def test_settings_count_runs_and_cost():
    settings = make_study().settings
    assert settings["searched"] == "7 training runs of 7 batch sizes (1 out of memory)."
    assert settings["cost"].startswith("Search: 6 complete trainings, which took 24 s.")


@pytest.mark.parametrize(
    ("trials", "advice"),
    [
        ((make_trial(16, status="out_of_memory"),), "micro_batch_size"),
        ((make_trial(16, status="failed"),), "failed"),
        ((make_diverged(16),), "learning rate below"),
    ],
)
def test_page_advice_without_a_completed_trial(trials, advice):
    sentence = make_study(*trials).decide().page.sentences[1]
    assert advice in sentence
    assert ("micro_batch_size" in sentence) is (trials[0].status == "out_of_memory")


def test_notes_of_problems_and_trials():
    study = make_study(
        make_trial(16, notes=(Note.of("own_step_whole", size=8),)),
        make_trial(32, notes=(Note.of("own_step_whole", size=8),)),
        problems=("trial_9/kbatch.json is damaged", "another one"),
    )
    noted = codes(study)
    assert noted[0] == "left_out" and noted.count("own_step_whole") == 1
    assert study.notes[0].values["first"] == "trial_9/kbatch.json is damaged (1 more)"


def test_settings_of_a_search():
    settings = make_study().settings
    assert settings["batch_sizes"] == "[16, 32, 64, 128]"
    assert settings["seed"] == settings["seeds of the training runs"] == "0"
    assert settings["training data"] == "1,437 examples per epoch"


def beside(**changed):
    """Return a study of a changed trial and a normal one."""
    return make_study(make_trial(16, **changed), make_trial(32))


@pytest.mark.parametrize(
    ("study", "code", "expected"),
    [
        (beside(batch_size_seen=10), "another_batch_size", True),
        (beside(workers_on_device=2), "shared_device", True),
        (beside(device="A"), "devices_differ", False),
    ],
)
def test_notes_of_caveats(study, code, expected):
    assert (code in codes(study)) == expected
    assert code not in codes(make_study())
