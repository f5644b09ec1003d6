import types

import pytest
from records_factory import make_search, make_study, make_trial

from kbatch.records.json_files import RecordError, write_record
from kbatch.records.loading import load_study


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


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`\.json`.*study\.yaml"):
        make_study().save(tmp_path / "study.yaml")


@pytest.mark.parametrize(
    "damage", ['{"kbatch_schema": 99, "kind": "TrialRecord", "record": {}}', "{", "", "[]"]
)
def test_a_broken_trial_is_named_and_the_others_load(project, damage):
    broken = project / "trial_1" / "kbatch.json"
    broken.write_text(damage)
    study = load_study(project)
    assert [trial.batch_size for trial in study.trials] == [64, 128]
    assert len(study.problems) == 1
    assert str(broken) in study.problems[0]


def test_a_broken_search_file_is_named_and_the_trials_load(project):
    (project / "kbatch.json").write_text("{")
    study = load_study(project)
    assert len(study.trials) == 3
    assert study.search is None
    assert str(project / "kbatch.json") in study.problems[0]


def test_trials_without_the_search_file_load(project):
    (project / "kbatch.json").unlink()
    study = load_study(project)
    assert (len(study.trials), study.search, study.problems) == (3, None, ())


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
