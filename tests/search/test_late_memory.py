"""A trial that really runs out of memory although the probes did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kbatch
from kbatch.device.memory import limited_cpu

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Searches probed with 260 MiB in a process that has 110 MiB."""
    target = tmp_path_factory.mktemp("late")
    paths = [str(TESTS.parent), str(TESTS / "memory"), str(TESTS)]
    # Without oneDNN, whose convolutions crash where memory runs out in one of their threads.
    paths = {"PYTHONPATH": os.pathsep.join(paths), "TF_ENABLE_ONEDNN_OPTS": "0"}
    for name, limit in (("auto", limited_cpu(110 * 2**20)), ("given", {})):
        command = [sys.executable, str(TESTS / "search" / "late_memory.py"), str(target), name]
        environment = os.environ | paths | limit
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return target


def runs(directory, name):
    return [trial.executions[0] for trial in kbatch.load_study(directory / name).trials]


def test_the_batch_size_is_kept_and_the_micro_batch_halved(directory):
    small, middle, large = runs(directory, "auto")
    assert [run.status for run in (small, middle, large)] == ["completed"] * 3
    assert [run.batch_size_seen for run in (small, middle, large)] == [64, 512, 1024]
    assert small.micro_batch_size == 64
    assert middle.micro_batch_size < 512
    assert middle.examples_seen == large.examples_seen == 1024
    (note,) = [note for note in middle.notes if note.code == "memory_ran_out"]
    assert note.values["after"] >= middle.micro_batch_size


def test_the_trial_that_ran_again_gives_what_its_size_given_gives(directory):
    halved = {run.batch_size: run for run in runs(directory, "auto")}
    given = {run.batch_size: run for run in runs(directory, "given")}
    assert halved[1024].micro_batch_size == given[1024].micro_batch_size
    for size in (512, 1024):
        for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
            mine, theirs = (run[size].epochs[-1].metrics[name] for run in (halved, given))
            assert mine == pytest.approx(theirs, rel=1e-5), name


def test_the_plan_was_made_once_and_halved(directory):
    small, middle, large = runs(directory, "auto")
    assert small.plan_s > 0
    assert [run.plan_s for run in (middle, large)] == [None, None]
    assert small.plan == 1 < middle.plan <= large.plan
