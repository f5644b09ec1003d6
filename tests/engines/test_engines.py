"""Searches on the real engines, left alone and disturbed."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import faulty_search
import pytest
import search_on_cluster

import kbatch
from kbatch.memory.record import MaxBatchSizeResult, ProbeRecord
from kbatch.records.json_codec import read_record, write_record
from kbatch.search.resources import MEMORY_NAME, MeasuredMemory

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
def test_the_example_searches_on(engine, tmp_path, capsys):
    study = search_on_cluster.search(engine, tmp_path, batch_sizes=(64, 256), epochs=2)
    assert statuses(study) == {64: ["completed"], 256: ["completed"]}
    search_on_cluster.show(study)
    assert "samples_per_second" in capsys.readouterr().out


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
    # A job of SLURM goes on without its driver; Ray and Dask end what nobody waits for.
    assert faulty_search.begun(tmp_path) == {8: 1, 16: 1 if engine == "slurm" else 2, 32: 1}


def test_jobs_ask_for_the_memory_that_was_measured(slurm, tmp_path):
    before = set(slurm_jobs())
    study = search_on_cluster.search(
        "slurm", tmp_path, batch_sizes=(64, 256), epochs=2, resources="auto"
    )
    assert statuses(study) == {64: ["completed"], 256: ["completed"]}
    measured = read_record(MeasuredMemory, tmp_path / "digits" / MEMORY_NAME)
    asked = [memory for job, memory in slurm_jobs().items() if job not in before]
    needed = math.ceil(1.25 * measured.host_bytes / 2**30 + 0.5)
    assert sorted(asked) == sorted(["2G", f"{needed}G", f"{needed}G"])


def slurm_jobs():
    """The memory that each job asked for."""
    words = ["squeue", "--noheader", "--states=all", "--format=%i %m"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in found.splitlines())


@pytest.mark.parametrize("engine", ["slurm", "ray"], indirect=True)
def test_what_no_node_has_fails_and_names_the_bytes(engine, tmp_path):
    limit = 2**50
    probes = tuple(
        ProbeRecord(size, peak, "fits", 1.0) for size, peak in ((16, 2**20), (32, 2**45))
    )
    known = (32, "it was the largest", False, limit, (0.8, 0.9), True, "CPU:0", "float32", 2**20)
    file = tmp_path / "digits" / MEMORY_NAME
    file.parent.mkdir()
    write_record(MeasuredMemory(MaxBatchSizeResult(*known, probes=probes), 2**45), file)
    # A batch of 64 goes through in parts of 32.
    study = search_on_cluster.search(
        engine, tmp_path, batch_sizes=(16, 64), epochs=2, resources="auto"
    )
    assert statuses(study) == {16: ["completed"], 64: ["out_of_memory"]}
    failure = study.trials[-1].failure
    assert "No node has what this execution needs, 40" in failure
    assert "TiB of host memory" in failure
