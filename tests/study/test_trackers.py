"""The runs of a study for trackers, and refused trackers."""

import sys

import pytest
from records_factory import make_execution, make_study, make_trial, write_search

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.cli import main as cli
from kbatch.study.study import load_study
from kbatch.study.trackers import tracked_runs
from kbatch.study.trial import trial_row


def two_executions(size=64):
    scaling = LearningRateScaling("sqrt", size, size, 1.0, 0.001)
    curves = ((0.9, 0.95), (0.9, 0.96))
    made = [make_execution(size, seed=n, accuracies=curves[n], scaling=scaling) for n in (0, 1)]
    return make_trial(size, *made)


@pytest.fixture
def project(tmp_path):
    """A search of two sizes. One ran twice, the other one ran out of memory."""
    out = make_trial(4096, status="out_of_memory")
    return write_search(tmp_path / "digits", two_executions(), out)


def by_key(*trials):
    study = make_study(*trials)
    runs = tracked_runs(study.name, study.trials, study.search, study.decide())
    return {run.key: run for run in runs}


def test_tracked_runs_of_study():
    runs = by_key(two_executions(), make_trial(4096, status="out_of_memory"))
    assert list(runs) == ["", "0064-0", "0064-1", "4096-0"]
    study, *executions = runs.values()
    assert [run.status for run in executions] == ["completed", "completed", "out_of_memory"]
    assert "out of memory" in executions[-1].text
    assert study.metrics["batch_size"] == 64
    assert (study.metrics["trials"], study.metrics["executions"]) == (2, 3)
    assert study.metrics["best_epoch/val_accuracy"] == pytest.approx(0.955)
    assert "64" in study.text


def test_tracked_run_values():
    trial = two_executions()
    first = by_key(trial)["0064-0"]
    (before_s, before), (after_s, _) = first.epochs
    assert (first.settings["trial_id"], first.settings["run"]) == ("0064", 0)
    assert first.settings["batch_size"] == first.settings["micro_batch_size"] == 64
    assert first.settings["learning_rate_scaling"] == "sqrt"
    assert first.settings["seed"] == 0
    assert first.metrics["samples_per_second"] == trial.executions[0].samples_per_second
    assert first.metrics["best_epoch/val_accuracy"] == 0.95
    assert before["val_accuracy"] == 0.9
    assert before["epoch/samples_per_second"] == 1437 / 0.5
    assert (before_s, after_s) == (0.5, 1.0)
    numbers = {n for n, v in trial_row(trial, 0).items() if isinstance(v, (int, float))}
    assert numbers - first.metrics.keys() - first.settings.keys() == set()


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_tracked_runs_leave_out_unfinished_runs(status):
    again = make_execution(64, seed=1, status=status)
    begun = make_trial(64, make_execution(64), again)
    assert list(by_key(begun, make_trial(128, status=status))) == ["", "0064-0"]


@pytest.mark.parametrize("given", ["tensorboard", None, ["mlflow"]])
def test_log_to_unknown_tracker(given):
    with pytest.raises(ValueError, match="'mlflow' or 'wandb'") as error:
        make_study().log_to(given)
    assert f"Received: tracker={given!r}." in str(error.value)


def test_log_to_tracker_not_installed(monkeypatch, project, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        load_study(project).log_to("mlflow")
    assert cli.main(["export", str(project), "--to", "mlflow"]) == 1
    assert "pip install mlflow" in capsys.readouterr().err


def test_log_to_ignores_folder_named_like_tracker(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [n for n in sys.modules if n.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="not installed"):
        make_study().log_to("wandb")
