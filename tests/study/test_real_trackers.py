"""Studies in real trackers: runs are found again and written once, next to the user's runs."""

import json
import os
import shutil

import pytest
from records_factory import (
    make_execution,
    make_gpu,
    make_search,
    make_trial,
    make_usage,
    write_search,
)
from test_trackers import two_executions

from kbatch.cli import main as cli
from kbatch.records.json_codec import write_record
from kbatch.study.study import load_study

pytestmark = pytest.mark.tracker


@pytest.fixture
def project(tmp_path):
    usage = make_usage(make_gpu(energy_j=500.0))
    odd = make_trial(128, hyperparameters={"learning_rate": 0.5, "units[0]: x/..": 3}, usage=usage)
    out = make_trial(4096, status="out_of_memory")
    return write_search(tmp_path / "digits", two_executions(), odd, out)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """A database of MLflow, which takes seconds to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DO_NOT_TRACK", "true")
        mlflow = pytest.importorskip("mlflow")
        path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
        mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow(tmp_path, monkeypatch, empty_database):
    """MLflow with a store of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path)
    monkeypatch.setenv("DO_NOT_TRACK", "true")  # Its telemetry.
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(None)
    return mlflow


def runs_by_key(mlflow, name="digits"):
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(name).experiment_id
    listed = client.search_runs([experiment])
    found = {run.data.tags["kbatch.run"]: run for run in listed}
    assert len(found) == len(listed)
    return found


def history(mlflow, run, metric):
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in sorted(points, key=lambda p: p.step)]


def test_mlflow_nests_runs_below_study(mlflow, project, capsys):
    own = mlflow.start_run(run_name="own")
    before = dict(os.environ)
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 0
    assert capsys.readouterr().out.endswith("experiment digits\n")
    assert mlflow.active_run().info.run_id == own.info.run_id
    assert dict(os.environ) == before
    mlflow.end_run()
    runs = runs_by_key(mlflow)
    assert runs.keys() == {"", "0064-0", "0064-1", "0128-0", "4096-0"}
    study = runs.pop("")
    assert "mlflow.parentRunId" not in study.data.tags
    parents = {run.data.tags["mlflow.parentRunId"] for run in runs.values()}
    assert parents == {study.info.run_id}
    statuses = {key: run.info.status for key, run in runs.items()}
    assert {key for key, status in statuses.items() if status == "FAILED"} == {"4096-0"}
    first, odd = runs["0064-0"], runs["0128-0"]
    assert first.data.params["batch_size"] == "64"
    assert odd.data.params["hp/learning_rate"] == "0.5"
    (units,) = [name for name in odd.data.params if name.startswith("hp/units_0__ x_")]
    assert odd.data.params[units] == "3"
    assert odd.data.metrics["gpu_energy_j"] == 500.0
    assert history(mlflow, first, "val_accuracy") == [(0, 0.9), (1, 0.95)]
    assert first.info.end_time - first.info.start_time == pytest.approx(4000, abs=2)
    assert study.data.metrics["batch_size"] == load_study(project).decide().batch_size
    assert study.data.tags["batch_sizes"] == "[16, 32, 64, 128]"
    assert "batch size" in study.data.tags["mlflow.note.content"].lower()


def test_mlflow_writes_new_runs_only(mlflow, project):
    for _ in range(2):
        load_study(project).log_to("mlflow")
    first = runs_by_key(mlflow)
    assert len(first) == 5
    assert len(history(mlflow, first["0064-0"], "val_accuracy")) == 2
    assert len(history(mlflow, first["0064-0"], "samples_per_second")) == 1
    assert history(mlflow, first[""], "executions") == [(4, 4.0)]
    # Writing one run was interrupted, and another run has ended.
    client = mlflow.MlflowClient()
    client.delete_tag(first["0128-0"].info.run_id, "kbatch.status")
    write_search(project, make_trial(128, make_execution(128), make_execution(128, seed=1)))
    # A search that continues may have other sizes.
    write_record(make_search(batch_sizes=[16, 32]), project / "kbatch.json")
    load_study(project).log_to("mlflow")
    second = runs_by_key(mlflow)
    assert second.keys() - first.keys() == {"0128-1"}
    changed = {key for key in first if first[key].info.run_id != second[key].info.run_id}
    assert changed == {"0128-0"}
    assert len(history(mlflow, second["0128-0"], "val_accuracy")) == 2
    assert history(mlflow, second[""], "executions") == [(4, 4.0), (5, 5.0)]
    assert second["0128-0"].info.status == "FINISHED"
    assert second[""].data.tags["batch_sizes"] == "[16, 32]"


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_mlflow_experiment_of_environment(mlflow, project, monkeypatch, variable):
    name = "of my own"
    by_name = variable == "MLFLOW_EXPERIMENT_NAME"
    given = name if by_name else mlflow.MlflowClient().create_experiment(name)
    monkeypatch.setenv(variable, given)
    assert load_study(project).log_to("mlflow").endswith(f"experiment {name}")
    assert len(runs_by_key(mlflow, name)) == 5
    assert mlflow.MlflowClient().get_experiment_by_name("digits") is None


def test_mlflow_deleted_experiment(mlflow, project, monkeypatch):
    client = mlflow.MlflowClient()
    client.delete_experiment(experiment := client.create_experiment("digits"))
    with pytest.raises(ValueError, match=f"experiments restore -x {experiment}"):
        load_study(project).log_to("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits again")
    assert load_study(project).log_to("mlflow").endswith("digits again")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    client.restore_experiment(experiment)
    assert load_study(project).log_to("mlflow").endswith("digits")


def test_mlflow_server_down(mlflow, project, monkeypatch, capsys):
    works = os.environ["MLFLOW_TRACKING_URI"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 1
    assert "run this command again" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", works)
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 0
    assert len(runs_by_key(mlflow)) == 5


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


def written(folder):
    """Return the run ids of W&B's folders in the order of time."""
    found = (folder / "wandb").glob("offline-run-*")
    return [path.name.split("-", 3)[-1] for path in sorted(found)]


def executions_written(folder):
    return [run_id for run_id in written(folder) if "-study" not in run_id]


def records_of_log(log):
    """Yield the records of a LevelDB log. Parts are in blocks of 32 KiB after their lengths."""
    place, record = 7, b""
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # A complete record, or the last part.
            yield record
            record = b""


def logged(folder, run_id):
    """Read the settings, rows and summary of a W&B run as its server would."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (folder / "wandb").glob(f"offline-run-*-{run_id}/*.wandb")
    config, rows, summary = {}, [], {}
    for data in records_of_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = [*record.run.config.update, *record.config.update]
        config |= {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
        if record.history.item:
            found = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in found})
        found = record.summary.update
        summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in found}
    return config, rows, summary


def test_wandb_runs(wandb, project, tmp_path, capfd):
    own = wandb.init(project="mine", settings=wandb.Settings(silent=True, console="off"))
    assert cli.main(["export", str(project), "--to", "wandb"]) == 0
    assert capfd.readouterr().out.startswith("wandb: project digits, group digits (")
    assert wandb.run is own
    own.log({"still": 1})
    own.finish()
    found = written(tmp_path)
    assert len(set(found)) == len(found) == 1 + 5
    (first,) = [run_id for run_id in found if run_id.endswith("-0064-0")]
    config, rows, summary = logged(tmp_path, first)
    assert config["batch_size"] == 64
    assert [row["val_accuracy"] for row in rows] == [0.9, 0.95]
    assert summary["best_epoch/val_accuracy"] == 0.95
    (study,) = [run_id for run_id in found if run_id.endswith("-study")]
    config, rows, summary = logged(tmp_path, study)
    assert (config["batch_sizes"], rows) == ([16, 32, 64, 128], [])
    assert summary["batch_size"] == load_study(project).decide().batch_size
    assert "batch size" in config["text"].lower()


def test_wandb_writes_new_runs_only(wandb, project, tmp_path):
    for _ in range(2):
        load_study(project).log_to("wandb")
    first = executions_written(tmp_path)
    write_search(project, make_trial(256))
    load_study(project).log_to("wandb")
    # The study is written each time, and a training run once.
    second = executions_written(tmp_path)
    (added,) = set(second) - set(first)
    assert (len(first), len(second)) == (4, 5)
    assert added.endswith("-0256-0")
