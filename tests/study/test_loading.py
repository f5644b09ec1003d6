import json
import os
import types
from pathlib import Path

import pytest
from records_factory import make_search, make_study, make_trial

from kbatch.records.json_codec import RecordError, write_record
from kbatch.study.study import load_study


@pytest.fixture
def project(tmp_path):
    """A search's folder with three trials, their names not in the order of their sizes."""
    folder = tmp_path / "results" / "digits"
    write_record(make_search(), folder / "kbatch.json")
    for name, size in {"0": 128, "1": 16, "2": 64}.items():
        write_record(make_trial(size, trial_id=name), folder / f"trial_{name}" / "kbatch.json")
    return folder


@pytest.mark.parametrize("give", [str, lambda p: p, lambda p: types.SimpleNamespace(project_dir=p)])
def test_a_folder_or_a_tuner_gives_the_study(project, give):
    study = load_study(give(project))
    assert study.name == "digits"
    assert [trial.batch_size for trial in study.trials] == [16, 64, 128]
    assert study.search == make_search()
    assert study.problems == ()


def test_a_saved_study_comes_back(tmp_path):
    make_study().save(tmp_path / "study.json")
    assert load_study(tmp_path / "study.json") == make_study()


def test_a_broken_search_file_is_named_and_the_trials_load(project):
    (project / "kbatch.json").write_text("{")
    study = load_study(project)
    assert len(study.trials) == 3
    assert study.search is None
    assert str(project / "kbatch.json") in study.problems[0]


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_without_records_it_says_what_to_give(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"directory/project_name.*BatchSizeHyperModel"):
        load_study(tmp_path / folder)


def test_the_folder_above_a_study_names_the_study(project):
    with pytest.raises(FileNotFoundError, match=f"One lies in {project}"):
        load_study(project.parent)


def test_a_file_that_is_no_study_is_an_error(project):
    with pytest.raises(RecordError, match="holds a TrialRecord, not a Study"):
        load_study(project / "trial_0" / "kbatch.json")


DAMAGE = {
    "nested deeply": lambda trial: "[" * 100_000 + "]" * 100_000,
    "an endless number": lambda trial: json.dumps(trial).replace("64", "9" * 5000),
    "a huge metric": lambda trial: edited(trial, reported={"val_accuracy": 1e308}),
    "an id that is a path": lambda trial: renamed(trial, "../0"),
    "the id of another": lambda trial: renamed(trial, "0"),
}


def edited(trial, **changed):
    record = trial["record"]
    (execution,) = record["executions"]
    return json.dumps(trial | {"record": record | {"executions": [execution | changed]}})


def renamed(trial, trial_id):
    return json.dumps(trial | {"record": trial["record"] | {"trial_id": trial_id}})


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_trial_is_named_and_leaves_the_others(project, damage):
    file = project / "trial_2" / "kbatch.json"
    file.write_text(DAMAGE[damage](json.loads(file.read_text())))
    study = load_study(project)
    assert [trial.trial_id for trial in study.trials] == ["1", "0"]
    (problem,) = study.problems
    assert problem.startswith(str(file))
    assert len(problem) < 500


@pytest.mark.parametrize("state", ["[" * 100_000, '{"status": "FAILED", "message": 3}', "3", "{}"])
def test_a_damaged_state_of_keras_tuner_leaves_the_trials(project, state):
    file = project / "trial_3" / "trial.json"
    file.parent.mkdir()
    file.write_text(state)
    assert len(load_study(project).trials) == 3


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(project):
    (project / "trial_1" / "kbatch.json").unlink()
    os.mkfifo(project / "trial_1" / "kbatch.json")
    study = load_study(project)
    assert (len(study.trials), len(study.problems)) == (2, 1)


def test_a_folder_whose_name_is_no_text_is_read_and_shown(project, tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9\n$x$"))
    project.rename(folder)
    (folder / "trial_1" / "kbatch.json").write_text("{")
    study = load_study(folder)
    assert study.name == "caf\N{REPLACEMENT CHARACTER} $x$"
    assert len(study.trials) == 2
    (problem,) = study.problems
    assert "caf\N{REPLACEMENT CHARACTER}".encode() in problem.encode()
    study.save(tmp_path / "study.json")
    assert load_study(tmp_path / "study.json") == study


def test_text_that_cannot_be_shown_is_replaced(project):
    file = project / "trial_2" / "kbatch.json"
    trial = json.loads(file.read_text())
    file.write_text(edited(trial, failure="a\ud800b\x1b[2J"))
    (trial,) = (t for t in load_study(project).trials if t.trial_id == "2")
    assert trial.failure == "a\ufffdb\ufffd[2J"
