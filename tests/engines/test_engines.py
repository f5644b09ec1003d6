"""Searches on the real engines, left alone and disturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import faulty_search
import pytest
import search_on_cluster

import kbatch

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def workers_find_the_tests():
    """An engine's processes inherit the environment of the driver."""
    paths = [TESTS.parent, TESTS.parent / "examples", TESTS, TESTS / "engines"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))


def statuses(study):
    return {
        trial.batch_size: [execution.status for execution in trial.executions]
        for trial in study.trials
    }


ALL_COMPLETED = {size: ["completed"] for size in faulty_search.SIZES}


@pytest.mark.parametrize("engine", ["slurm", "ray", "dask"], indirect=True)
def test_the_example_searches_on(engine, tmp_path):
    study = search_on_cluster.search(engine, tmp_path, batch_sizes=(64, 256), epochs=2)
    assert statuses(study) == {64: ["completed"], 256: ["completed"]}
    assert study.decide().batch_size in (64, 256)


# The faults of one search: an execution that was lost runs once more, no other one does.
@pytest.mark.parametrize(
    ("engine", "faults"),
    [
        ("slurm", {8: "kill_worker", 16: "cancel_job", 32: "preempt_job"}),
        ("ray", {16: "kill_worker"}),
        ("dask", {16: "kill_worker"}),
    ],
    indirect=["engine"],
    ids=["slurm", "ray", "dask"],
)
def test_what_an_engine_loses_runs_once_more(engine, faults, tmp_path):
    study = faulty_search.search(engine, tmp_path, dict(faults))
    assert statuses(study) == ALL_COMPLETED
    expected = {size: 1 + (size in faults) for size in faulty_search.SIZES}
    assert faulty_search.begun(tmp_path) == expected


@pytest.mark.parametrize("engine", ["slurm", "ray", "dask"], indirect=True)
def test_a_killed_driver_is_started_again(engine, tmp_path):
    script = [sys.executable, faulty_search.__file__, engine, str(tmp_path)]
    first = subprocess.run([*script, "16=kill_driver"], timeout=600, check=False)
    assert first.returncode == -signal.SIGKILL
    assert statuses(kbatch.load_study(tmp_path / "search"))[8] == ["completed"]
    second = subprocess.run(script, timeout=600, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    study = kbatch.load_study(tmp_path / "search")
    assert statuses(study) == ALL_COMPLETED
    # What still ran runs again, also where its job goes on without its driver, as on SLURM.
    assert faulty_search.begun(tmp_path) == {8: 1, 16: 2, 32: 1}
