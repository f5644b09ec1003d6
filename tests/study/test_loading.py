"""Studies from files: what is read, what is left out and named, and that every page says so."""

import dataclasses
import json
import os
import platform
import shutil
import time
import types
from pathlib import Path

import psutil
import pytest
from figure_studies import learned_study
from records_factory import make_search, make_trial, write_search

import kbatch
from kbatch.cli.main import main
from kbatch.errors import RecordError
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import Progress
from kbatch.study.study import load_study


@pytest.fixture
def project(tmp_path):
    """A search's folder with three trials, their names not in the order of their sizes."""
    sizes = {"0": 128, "1": 16, "2": 64}
    trials = (make_trial(size, trial_id=name) for name, size in sizes.items())
    return write_search(tmp_path / "results" / "digits", *trials)


@pytest.mark.parametrize("give", [str, lambda p: p, lambda p: types.SimpleNamespace(project_dir=p)])
def test_a_folder_or_a_tuner_gives_the_study(project, give):
    study = load_study(give(project))
    assert study.name == "digits"
    assert [trial.batch_size for trial in study.trials] == [16, 64, 128]
    assert study.search == make_search()
    assert study.problems == ()


def test_without_records_it_says_what_to_give(project, tmp_path):
    (tmp_path / "empty").mkdir()
    # keras-tuner's own files make no study.
    (tmp_path / "other" / "trial_0").mkdir(parents=True)
    (tmp_path / "other" / "trial_0" / "trial.json").write_text('{"status": "COMPLETED"}')
    for folder in ("missing", "empty", "other"):
        with pytest.raises(FileNotFoundError, match=r"directory/project_name.*BatchSizeHyperModel"):
            load_study(tmp_path / folder)
    with pytest.raises(FileNotFoundError, match=f"One lies in {project}"):
        load_study(project.parent)
    with pytest.raises(RecordError, match="holds a TrialRecord, not a Study"):
        load_study(project / "trial_0" / "kbatch.json")


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({}, True),
        ({"process": None}, False),
        ({"process": 2**22 + 1}, False),
        ({"process_began_at": 1.0}, False),
        ({"host": "another"}, True),
        ({"host": "another", "written_at": 1.0}, False),
    ],
    ids=str,
)
def test_a_search_runs_only_as_long_as_its_process(project, changed, runs, capsys):
    process = psutil.Process()
    here = {"host": platform.node(), "process": process.pid, "written_at": time.time()}
    here |= {"process_began_at": process.create_time(), "most_trainings": 14.0, "left_s": 1860.5}
    write_record(Progress(**here | {"search_s": 60.0} | changed), project / "kbatch-progress.json")
    write_search(project, make_trial(256, status="running", trial_id="3"))
    study = load_study(project)
    text = "Running: 3 of at most 14 complete trainings, about 31 min left."
    assert study.answer.startswith(text) is runs
    assert study.trials[-1].status == ("running" if runs else "interrupted")
    named = study.decide().page.sentences[0]
    assert named.startswith("The search is unfinished (3 of at most 14 complete") is not runs
    assert not {"to_be_certain", "sizes_not_compared"} & {n.code for n in study.decide().notes}
    ended = dataclasses.replace(study.progress, process=None, left_s=0.0)
    ended = dataclasses.replace(study, progress=ended)
    assert ended.decide().page.sentences[0].startswith("Keep batch size 16")
    cost = text if runs else "Search: 3 complete trainings in 60 s."
    assert study.decide().page.cost.startswith(cost)
    study.save(project / "study.json")  # When it is loaded, it is known again.
    assert load_study(project / "study.json").trials == study.trials
    marks = [line.get_marker() for line in kbatch.plot_trials(study).lines]
    assert ("X" in marks) is not runs
    assert main(["report", str(project), "-o", str(project / "report.md")]) == 0
    assert (text in capsys.readouterr().out) is runs
    assert (text in (project / "report.md").read_text()) is runs
    for folder in project.glob("trial_*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="not begun" if runs else "has no trial"):
        kbatch.plot_trials(load_study(project))


def edited(trial, **changed):
    record = trial["record"]
    (execution,) = record["executions"]
    return json.dumps(trial | {"record": record | {"executions": [execution | changed]}})


@pytest.mark.parametrize("damage", ["nested deeply", "the id of another"])
def test_one_damaged_trial_is_named_and_leaves_the_others(project, damage):
    file = project / "trial_2" / "kbatch.json"
    other = file.read_text().replace('"trial_id": "2"', '"trial_id": "0"')
    file.write_text(other if damage == "the id of another" else "[" * 100_000)
    study = load_study(project)
    assert [trial.trial_id for trial in study.trials] == ["1", "0"]
    (problem,) = study.problems
    assert problem.startswith(str(file))
    assert len(problem) < 500


@pytest.mark.parametrize("state", ["[" * 100_000, '{"status": "FAILED", "message": 3}', "{}"])
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


def test_what_cannot_be_shown_is_replaced(project, tmp_path):
    file = project / "trial_2" / "kbatch.json"
    file.write_text(edited(json.loads(file.read_text()), failure="a\ud800b\x1b[2J"))
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9\n$x$"))
    project.rename(folder)
    (folder / "trial_1" / "kbatch.json").write_text("{")
    study = load_study(folder)
    assert study.name == "caf\N{REPLACEMENT CHARACTER} $x$"
    assert [trial.failure for trial in study.trials] == ["a\ufffdb\ufffd[2J", None]
    (problem,) = study.problems
    assert "caf\N{REPLACEMENT CHARACTER}".encode() in problem.encode()
    study.save(tmp_path / "study.json")
    assert load_study(tmp_path / "study.json") == study


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_a_missing_trial_may_have_been_the_best_and_every_page_says_so(how, tmp_path, capsys):
    study = learned_study(2, sizes=(16, 64, 256))
    folder = write_search(tmp_path / "search", *study.trials)
    file = folder / f"trial_{study.decide().trial.trial_id}" / "kbatch.json"
    # keras-tuner's file says that it ended.
    file.with_name("trial.json").write_text('{"status": "COMPLETED"}')
    file.write_text("") if how == "damaged" else file.unlink()
    study = load_study(folder)
    assert study.missing == 1
    assert "1 missing" in repr(study)
    (problem,) = study.problems
    assert str(file.parent) in problem
    report = tmp_path / "r.md"
    assert main(["report", str(folder), "-o", str(report)]) == 0
    assert f"left out: {folder}/trial_" in capsys.readouterr().err
    assert study.notes[0].code == "trials_missing"
    assert study.notes[0] in report.read_text()
    assert study.notes[0] in kbatch.plot_trials(study).get_label()
