"""A search that is killed, again and again, ends as one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kbatch

SCRIPT = Path(__file__).with_name("killed_searches.py")
ROOT = Path(__file__).parents[2]
# What a clock says differs from run to run.
KEPT = ["trial_id", "status", "batch_size", "executions", "learning_rate", "updates", "accuracy"]
KEPT += ["loss", "val_accuracy", "val_loss", "examples_seen"]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kills"), [("grid", 8), ("race", 4)])
def test_a_search_killed_at_any_moment_ends_as_an_undisturbed_one(case, kills, tmp_path):
    paths = [str(ROOT), str(ROOT / "tests"), str(SCRIPT.parent)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(kills), "1", case],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    searches = json.loads(done.stdout.splitlines()[-1])
    assert sum(len(search["kills"]) for search in searches) >= kills
    assert [search["status"] for search in searches] == [0] * len(searches), done.stderr
    assert [search["repeated"] for search in searches] == [[]] * len(searches)
    undisturbed = kbatch.load_study(tmp_path / "undisturbed" / "search")
    if case == "race":
        decision = undisturbed.decide()
        assert sum(len(trial.executions) for trial in undisturbed.trials) <= 11
        assert decision.executions >= 3
    for number in range(len(searches)):
        study = kbatch.load_study(tmp_path / f"killed-{number}" / "search")
        assert study.problems == ()
        assert study.to_dataframe()[KEPT].equals(undisturbed.to_dataframe()[KEPT])
        assert study.best_trial().batch_size == undisturbed.best_trial().batch_size
        assert _decided(study) == _decided(undisturbed)
        assert _ran(study) == _ran(undisturbed)
        assert _told(tmp_path / f"killed-{number}") == _told(tmp_path / "undisturbed")


def _decided(study):
    """What a study decides."""
    found = study.decide()
    return found.batch_size, found.tied, found.worse, found.executions, found.judgement.gaps


def _ran(study):
    """What each execution of each trial drew and gave, its throughput aside."""
    return {
        trial.trial_id: [
            (
                (run.seed, run.initial_weights, run.first_order),
                (run.status, run.updates, {**run.reported, "samples_per_second": None}),
                run.outcomes,
            )
            for run in trial.executions
        ]
        for trial in study.trials
    }


def _told(directory):
    """What keras-tuner holds of each trial, its throughput aside."""
    trials = {}
    for file in (directory / "search").glob("trial_*/trial.json"):
        trial = json.loads(file.read_text())
        metrics = trial["metrics"]["metrics"]
        metrics.pop("samples_per_second", None)
        kept = ("status", "score", "best_step", "message")
        trials[trial["trial_id"]] = [metrics, *(trial[name] for name in kept)]
    return trials
