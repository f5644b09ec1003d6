"""Studies in the trackers themselves: found again, written once, and the user's own runs kept."""

import importlib
import os
import shutil
import sys

import pytest
from records_factory import make_execution, make_gpu, make_search, make_trial, make_usage
from test_trackers import two_executions, write_project

from kbatch.cli import main as cli
from kbatch.records.json_codec import write_record
from kbatch.study.study import load_study
from kbatch.study.trackers import sync

pytestmark = pytest.mark.tracker


@pytest.fixture
def project(tmp_path):
    usage = make_usage(make_gpu(energy_j=500.0))
    odd = make_trial(128, hyperparameters={"learning_rate": 0.5, "units[0]: x/..": 3}, usage=usage)
    out = make_trial(4096, status="out_of_memory")
    return write_project(tmp_path / "digits", two_executions(), odd, out)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """A database of MLflow, which takes seconds to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DO_NOT_TRACK", "true")
        mlflow = pytest.importorskip("mlflow")
        path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
        mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(params=["file", "sqlite"])
def mlflow(request, tmp_path, monkeypatch, empty_database):
    """MLflow with each of its local stores."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path)
    monkeypatch.setenv("DO_NOT_TRACK", "true")  # Its telemetry.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    uri = {"file": (tmp_path / "mlruns").as_uri(), "sqlite": f"sqlite:///{tmp_path}/mlflow.db"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri[request.param])
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(None)
    return mlflow


def runs_by_key(mlflow, name="digits"):
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(name).experiment_id
    return {run.data.tags["kbatch.run"]: run for run in client.search_runs([experiment])}


def history(mlflow, run, metric):
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in sorted(points, key=lambda p: p.step)]


def test_mlflow_nests_executions_in_trials_and_trials_in_the_study(mlflow, project, capsys):
    own = mlflow.start_run(run_name="own")
    before = dict(os.environ)
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 0
    assert capsys.readouterr().out.endswith("experiment digits\n")
    assert mlflow.active_run().info.run_id == own.info.run_id
    assert dict(os.environ) == before
    mlflow.end_run()
    client, runs = mlflow.MlflowClient(), runs_by_key(mlflow)
    ids = {key: run.info.run_id for key, run in runs.items()}
    parents = {key: run.data.tags.get("mlflow.parentRunId") for key, run in runs.items()}
    assert parents[""] is None
    for trial, executions in {"0064": 2, "0128": 1, "4096": 1}.items():
        assert parents[trial] == ids[""]
        assert [parents[f"{trial}/{n}"] for n in range(executions)] == [ids[trial]] * executions
    assert len(runs) == 8
    statuses = {key: run.info.status for key, run in runs.items()}
    assert {key for key, status in statuses.items() if status == "FAILED"} == {"4096", "4096/0"}
    first, odd = runs["0064/0"], runs["0128/0"]
    assert first.data.params["batch_size"] == "64"
    assert odd.data.params["hp/learning_rate"] == "0.5"
    (units,) = [name for name in odd.data.params if name.startswith("units_0__ x_")]
    assert odd.data.params[units] == "3"
    assert odd.data.metrics["gpu_energy_j"] == 500.0
    assert history(mlflow, first, "val_accuracy") == [(0, 0.9), (1, 0.95)]
    assert first.info.end_time - first.info.start_time == pytest.approx(4000, abs=2)
    assert runs["0064"].data.metrics["best_epoch/val_accuracy"] == pytest.approx(0.955)
    assert "batch size" in runs[""].data.tags["mlflow.note.content"].lower()
    kept = {file.path for file in client.list_artifacts(ids[""])}
    assert kept == {"kbatch.json", "report.html"}
    assert [file.path for file in client.list_artifacts(ids["0064"])] == ["kbatch.json"]


def test_mlflow_is_given_what_it_does_not_have(mlflow, project):
    for _ in range(2):
        sync(load_study(project), "mlflow", project)
    first = runs_by_key(mlflow)
    assert len(first) == 8
    assert len(history(mlflow, first["0064/0"], "val_accuracy")) == 2
    assert len(history(mlflow, first["0064/0"], "samples_per_second")) == 1
    assert history(mlflow, first["0064"], "executions") == [(2, 2.0)]
    # Writing an execution was cut off, and another one has ended.
    client = mlflow.MlflowClient()
    client.update_run(first["0128/0"].info.run_id, status="RUNNING")
    runs = (make_execution(128), make_execution(128, seed=1, accuracies=(0.8, 0.99)))
    write_project(project, make_trial(128, *runs))
    sync(load_study(project), "mlflow", project)
    second = runs_by_key(mlflow)
    assert second.keys() - first.keys() == {"0128/1"}
    changed = {key for key in first if first[key].info.run_id != second[key].info.run_id}
    assert changed == {"0128/0"}
    assert history(mlflow, second["0128/0"], "val_accuracy") == [(0, 0.9), (1, 0.97)]
    assert history(mlflow, second["0128"], "executions") == [(1, 1.0), (2, 2.0)]
    assert second["0128/0"].info.status == "FINISHED"


@pytest.mark.parametrize("mlflow", ["sqlite"], indirect=True)
def test_mlflow_shows_a_running_study_as_running_until_it_ends(mlflow, project):
    study = load_study(project)
    sync(study, "mlflow", project, ended=False)
    assert runs_by_key(mlflow)[""].info.status == "RUNNING"
    sync(study, "mlflow", project)
    found = runs_by_key(mlflow)[""]
    assert found.info.status == "FINISHED"
    assert found.data.metrics["batch_size"] == load_study(project).decide().batch_size


@pytest.mark.parametrize("mlflow", ["sqlite"], indirect=True)
def test_mlflow_is_set_up_as_its_users_do(mlflow, project):
    mlflow.set_experiment("of my own")
    sync(load_study(project), "mlflow", project)
    assert len(runs_by_key(mlflow, "of my own")) == 8
    assert mlflow.MlflowClient().get_experiment_by_name("digits") is None


@pytest.mark.parametrize("mlflow", ["sqlite"], indirect=True)
@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_the_experiment_is_the_one_that_the_user_names(
    mlflow, project, monkeypatch, capsys, variable
):
    name = "of my own"
    by_name = variable == "MLFLOW_EXPERIMENT_NAME"
    given = name if by_name else mlflow.MlflowClient().create_experiment(name)
    monkeypatch.setenv(variable, given)
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 0
    assert capsys.readouterr().out.endswith(f"experiment {name}\n")
    assert len(runs_by_key(mlflow, name)) == 8
    assert mlflow.MlflowClient().get_experiment_by_name("digits") is None


def test_a_parameter_that_a_continued_search_changed_is_a_tag(mlflow, project):
    def shown(sizes):
        write_record(make_search(batch_sizes=sizes), project / "kbatch.json")
        sync(load_study(project), "mlflow", project)
        data = runs_by_key(mlflow)[""].data
        assert data.params["batch_sizes"] == "[16, 32]"
        assert data.params["micro_batch_size"] == "128"
        return {name: text for name, text in data.tags.items() if ".now." in name}

    assert shown([16, 32]) == {}
    assert shown([16, 32, 64]) == {"kbatch.now.batch_sizes": "[16, 32, 64]"}
    assert shown([16, 32]) == {"kbatch.now.batch_sizes": "[16, 32]"}


def test_an_execution_that_failed_and_trained_again_is_another_run_of_mlflow(mlflow, project):
    write_project(project, make_trial(128, status="failed", failure="other rows"))
    written = set()
    sync(load_study(project), "mlflow", project, ended=False, written=written)
    failed = runs_by_key(mlflow)
    assert [failed[key].info.status for key in ("0128", "0128/0")] == ["FAILED", "FAILED"]
    assert failed["0128/0"].data.tags["mlflow.note.content"] == "other rows"
    write_project(project, make_trial(128))
    for _ in range(2):
        sync(load_study(project), "mlflow", project, ended=False, written=written)
    found = runs_by_key(mlflow)
    changed = {key for key in found if found[key].info.run_id != failed[key].info.run_id}
    assert changed == {"0128/0"}
    assert [found[key].info.status for key in ("0128", "0128/0")] == ["FINISHED", "FINISHED"]
    assert found["0128"].data.tags["mlflow.note.content"] == ""
    assert history(mlflow, found["0128/0"], "val_accuracy") == [(0, 0.9), (1, 0.97)]


@pytest.mark.parametrize("mlflow", ["sqlite"], indirect=True)
def test_a_server_of_mlflow_that_is_down_is_reported_and_written_later(
    mlflow, project, monkeypatch, capsys
):
    works = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 1
    assert "run the same command again" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", works)
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 0
    assert len(runs_by_key(mlflow)) == 8


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Weights & Biases without a server and without an account."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()


def test_wandb_has_a_run_of_each_execution_and_one_of_the_study(wandb, project, tmp_path, capfd):
    own = wandb.init(project="mine", settings=wandb.Settings(silent=True, console="off"))
    assert cli.main(["export", str(project), "--to", "wandb"]) == 0
    assert capfd.readouterr().out.startswith("wandb: project digits, group digits (")
    assert wandb.run is own
    own.log({"still": 1})
    own.finish()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 1 + 5


def test_wandb_without_an_account_is_reported(wandb, project, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert cli.main(["export", str(project), "--to", "wandb"]) == 1
    assert "run the same command again" in capsys.readouterr().err


def test_trackio_has_a_run_of_each_execution_and_one_of_the_study(
    project, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    trackio = pytest.importorskip("trackio")
    own = trackio.init(project="mine", name="own", config={"own": 1})
    before = trackio.config
    capsys.readouterr()
    assert cli.main(["export", str(project), "--to", "trackio"]) == 0
    assert capsys.readouterr().out.startswith("trackio: project digits, group digits (")
    assert trackio.config is before
    trackio.log({"still": 1})
    own.finish()
    assert [run.name for run in trackio.Api().runs("mine")] == ["own"]
    runs = {run.name.partition(" (")[0]: run for run in trackio.Api().runs("digits")}
    assert len(runs) == 5
    first = runs["batch 64, trial 0064, execution 0"]
    assert first.config["batch_size"] == 64
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    logs = storage.get_logs("digits", first.name)
    assert [(log["step"], log["val_accuracy"]) for log in logs] == [(0, 0.9), (1, 0.95)]
    sync(load_study(project), "trackio", project)
    assert len(storage.get_logs("digits", first.name)) == 2
