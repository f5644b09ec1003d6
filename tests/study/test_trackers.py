"""What trackers are given of a study: once each, and nothing that may still change."""

import math
import re
import sys

import pytest
from records_factory import (
    make_epochs,
    make_execution,
    make_search,
    make_study,
    make_trial,
    make_usage,
)
from tracker_stub import stub_trackio

from kbatch.cli import main as cli
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import EpochRecord
from kbatch.study.study import load_study, trial_row
from kbatch.study.trackers import _allowed, check_trackers, sync, tracked_runs


def write_project(folder, *trials, search=True):
    if search:
        write_record(make_search(), folder / "kbatch.json")
    for trial in trials:
        write_record(trial, folder / f"trial_{trial.trial_id}" / "kbatch.json")
    return folder


def two_executions(size=64):
    runs = (make_execution(size, seed=n, accuracies=(0.9, 0.95 + n / 100)) for n in (0, 1))
    return make_trial(size, *runs)


@pytest.fixture
def project(tmp_path):
    """A search of two sizes, two executions of one and one of the other, which ran out."""
    out = make_trial(4096, status="out_of_memory")
    return write_project(tmp_path / "digits", two_executions(), out)


@pytest.fixture
def trackio(monkeypatch):
    return stub_trackio(monkeypatch)


def by_key(study, source, **given):
    return {run.key: run for run in tracked_runs(study, source, **given)}


def test_a_study_its_trials_and_their_executions_are_runs_behind_their_parents(project):
    runs = tracked_runs(load_study(project), project)
    keys = [run.key for run in runs]
    assert keys == ["", "0064", "0064/0", "0064/1", "4096", "4096/0"]
    assert [run.status for run in runs[3:]] == ["completed", "out_of_memory", "out_of_memory"]
    assert [run.step for run in runs] == [3, 2, 1, 1, 1, 0]
    assert "out of memory" in runs[-1].text
    assert [file.parent.name for file in runs[1].files] == ["trial_0064"]


def test_a_run_has_the_numbers_of_the_table_and_of_each_epoch(project):
    study = load_study(project)
    runs, trial = by_key(study, project), study.trials[0]
    first, (before, after) = runs["0064/0"], runs["0064/0"].epochs
    assert first.settings["batch_size"] == 64
    assert first.settings["micro_batch_size"] == 64
    assert first.settings["learning_rate_scaling"] == "sqrt"
    assert first.settings["seed"] == 0
    assert first.metrics["samples_per_second"] == trial.executions[0].samples_per_second
    assert first.metrics["best_epoch/val_accuracy"] == 0.95
    assert before[1]["val_accuracy"] == 0.9
    assert before[1]["epoch/samples_per_second"] == 1437 / 0.5
    assert (before[0], after[0]) == (0.5, 1.0)
    whole, row = runs["0064"], trial_row(trial)
    assert whole.metrics["best_epoch/val_accuracy"] == pytest.approx(0.955)
    numbers = {n for n, v in row.items() if isinstance(v, (int, float))}
    assert numbers - whole.metrics.keys() - whole.settings.keys() == set()
    assert all(math.isfinite(v) for run in runs.values() for v in run.metrics.values())


def test_memory_energy_and_noise_scale_are_among_them(tmp_path):
    epochs = tuple(
        EpochRecord(
            epoch=n,
            metrics={"loss": 0.5, "gradient_variance": 8.0, "gradient_squared_norm": 2.0},
            examples=1437,
            updates=23,
            train_s=0.5,
            data_wait_s=0.0,
        )
        for n in range(4)
    )
    from records_factory import make_gpu

    trial = make_trial(64, epochs=epochs, usage=make_usage(make_gpu(energy_j=500.0)))
    run = by_key(make_study(trial), write_project(tmp_path, trial))["0064/0"]
    assert run.metrics["gpu_energy_j"] == 500.0
    assert run.metrics["resident_bytes"] == 1e9
    assert [values["epoch/noise_scale"] for _, values in run.epochs] == [4.0] * 4


def test_the_study_has_the_numbers_and_words_of_its_answer_when_it_has_ended(project):
    study = load_study(project)
    running, ended = (by_key(study, project, ended=e)[""] for e in (False, True))
    assert (running.status, running.text) == ("running", None)
    assert "best_epoch/val_accuracy" not in running.metrics
    assert ended.metrics["batch_size"] == 64
    assert ended.metrics["trials"] == 2
    assert ended.metrics["executions"] == 3
    assert "64" in ended.text
    assert ended.settings["batch_sizes"] == [16, 32, 64, 128]
    assert ended.settings["tensorflow"] == "2.21.0"


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_an_execution_that_will_train_again_is_left_out(tmp_path, status):
    again = make_execution(64, seed=1, status=status)
    begun = make_trial(64, make_execution(64), again)
    alone = make_trial(128, status=status)
    study = make_study(begun, alone)
    assert list(by_key(study, write_project(tmp_path, begun))) == ["", "0064", "0064/0"]
    assert tracked_runs(make_study(alone), tmp_path) == []


def test_a_hyperparameter_covers_no_number_and_is_not_covered(tmp_path):
    trial = make_trial(64, hyperparameters={"learning_rate": 0.5, "units": 32})
    settings = by_key(make_study(trial), write_project(tmp_path, trial))["0064/0"].settings
    assert (settings["learning_rate"], settings["hp/learning_rate"]) == (0.001, 0.5)
    assert settings["units"] == 32


def test_a_value_that_is_not_finite_is_left_out(tmp_path):
    epochs = make_epochs((math.nan, 0.9))
    trial = make_trial(64, epochs=epochs)
    run = by_key(make_study(trial), write_project(tmp_path, trial))["0064/0"]
    assert "val_accuracy" not in run.epochs[0][1]
    assert run.epochs[1][1]["val_accuracy"] == 0.9


def test_writing_twice_adds_nothing_and_a_new_execution_adds_itself(project, trackio, capsys):
    shown = sync(load_study(project), "trackio", project)
    assert shown.startswith("project digits, group digits (")
    assert capsys.readouterr().out == ""
    names = list(trackio.runs)
    assert len(names) == 4
    assert {run.given["group"] for run in trackio.runs.values()} == {shown.split("group ")[1]}
    calls = {name: list(run.log_calls) for name, run in trackio.runs.items()}
    sync(load_study(project), "trackio", project)
    assert {name: run.log_calls for name, run in trackio.runs.items()} == calls
    write_project(project, make_trial(128))
    sync(load_study(project), "trackio", project)
    added = [run.given["name"] for name, run in trackio.runs.items() if name not in names]
    # The study was continued, so its numbers are others.
    assert len(added) == 2
    assert added[1].startswith("batch 128, trial 0128, execution 0 (")


def test_an_execution_that_failed_and_trained_again_is_another_run(project, trackio):
    write_project(project, make_trial(128, status="failed", failure="other rows"))
    written = set()
    sync(load_study(project), "trackio", project, ended=False, written=written)
    write_project(project, make_trial(128))
    for _ in range(2):
        sync(load_study(project), "trackio", project, ended=False, written=written)
    statuses = [
        run.given["config"]["status"]
        for run in trackio.runs.values()
        if run.given["name"].startswith("batch 128")
    ]
    assert statuses == ["failed", "completed"]


def test_names_that_mlflow_does_not_allow_stay_different():
    names = ["lr", "a:b", "a_b", "x" * 300, "x" * 300 + "y", "best_epoch/val_accuracy"]
    allowed = [_allowed(name) for name in names]
    assert (allowed[0], allowed[2], allowed[5]) == (names[0], names[2], names[5])
    assert len(set(allowed)) == len(names)
    assert max(map(len, allowed)) <= 250


def test_an_execution_is_logged_by_epoch_with_what_holds_for_the_whole_in_the_last(
    project, trackio
):
    sync(load_study(project), "trackio", project)
    run = next(run for name, run in trackio.runs.items() if "0064, execution 1" in name)
    (first, before), (second, after) = run.log_calls
    assert (first, second) == (0, 1)
    assert before["val_accuracy"] == 0.9
    assert "best_epoch/val_accuracy" not in before
    assert after["best_epoch/val_accuracy"] == after["val_accuracy"] == 0.96
    assert run.given["config"]["batch_size"] == 64
    assert run.given["config"]["status"] == "completed"


def test_the_study_keeps_the_records_and_what_else_is_given(project, trackio, tmp_path):
    report = tmp_path / "report.html"
    report.write_text("<p>")
    sync(load_study(project), "trackio", project, files=[report])
    (run,) = [run for run in trackio.runs.values() if run.files]
    assert run.files["report.html"] == b"<p>"
    record = project / "trial_0064" / "kbatch.json"
    assert run.files["trial_0064/kbatch.json"] == record.read_bytes()
    assert "kbatch.json" in run.files


def test_a_run_of_the_users_own_stays_open(project, trackio):
    own = trackio.init(project="mine", name="own", group=None, config={"own": 1})
    before = trackio.config
    sync(load_study(project), "trackio", project)
    assert own not in trackio.finished
    assert trackio.current.get() is own
    assert trackio.config is before


def test_another_study_of_the_same_name_has_runs_of_its_own(project, trackio, tmp_path):
    sync(load_study(project), "trackio", project)
    other = write_project(tmp_path / "other" / "digits", two_executions())
    record = other / "kbatch.json"
    record.write_text(record.read_text().replace("2025-01-02T", "2025-01-03T"))
    sync(load_study(other), "trackio", other)
    assert len(trackio.runs) == 4 + 3


def test_a_study_in_which_nothing_completed_is_written_and_no_table_beside_it(
    tmp_path, trackio, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    project = write_project(tmp_path / "digits", make_trial(64, status="failed"))
    assert cli.main(["export", str(project), "--to", "trackio"]) == 0
    assert capsys.readouterr().out.startswith("trackio: project digits, group digits (")
    assert not (tmp_path / "kbatch-trials.csv").exists()
    failed, study = sorted(trackio.runs.values(), key=lambda run: len(run.files))
    assert failed.given["config"]["text"] == "ValueError: the loss is not finite"
    assert "No batch size can be named" in study.given["config"]["text"]
    assert {"report.html", "kbatch.json", "trial_0064/kbatch.json"} <= study.files.keys()


def test_export_to_a_server_that_is_down_says_so_and_the_next_one_writes_all(
    project, trackio, tmp_path, capsys
):
    trackio.down = True
    assert cli.main(["export", str(project), "--to", "trackio"]) == 1
    said = capsys.readouterr().err
    assert "Received: ConnectionError: no server at localhost" in said
    assert "run the same command again" in said
    trackio.down, table = False, tmp_path / "t.csv"
    assert cli.main(["export", str(project), "--to", "trackio", "-o", str(table)]) == 0
    assert len(trackio.runs) == 4
    assert table.exists()


@pytest.mark.parametrize("given", ["mlflow", ["mlflow", "tensorboard"], None, [["mlflow"]]])
def test_unknown_trackers_are_refused_with_those_that_are_known(given):
    with pytest.raises(ValueError, match="'mlflow', 'wandb', 'trackio'") as error:
        check_trackers(given)
    assert f"Received: trackers={given!r}." in str(error.value)


def test_export_refuses_an_unknown_tracker(project, capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", str(project), "--to", "comet"])
    assert re.search(r"--to: .*'comet'.*mlflow.*wandb.*trackio", capsys.readouterr().err)


def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    monkeypatch, project, capsys
):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"pip install mlflow"):
        check_trackers(["mlflow"])
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 1
    assert "pip install mlflow" in capsys.readouterr().err


def test_a_folder_with_the_name_of_a_tracker_is_not_the_tracker(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [n for n in sys.modules if n.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="not installed"):
        check_trackers(["wandb"])
