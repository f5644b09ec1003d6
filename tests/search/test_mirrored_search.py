import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # Five searches over two replicas, in a process of their own.

TESTS = Path(__file__).parents[1]
ROWS = 94


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    script = TESTS / "search" / "mirrored_search.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("mirrored"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.getcwd()])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["one", "two", "whole"])
def test_every_example_is_counted_once_and_none_that_was_taken_ahead(found, name):
    assert [run["batch_size"] for run in found[name]] == [8, 32]
    for run in found[name]:
        batches = -(-ROWS // run["batch_size"])
        assert run["status"] == "completed"
        assert run["batch_size_seen"] == run["batch_size"]
        assert run["examples_seen"] == 2 * ROWS
        assert run["batches"] == run["updates"] == 2 * batches
        assert [epoch["examples"] for epoch in run["epochs"]] == [ROWS, ROWS]
        assert [epoch["batches"] for epoch in run["epochs"]] == [batches, batches]
        assert sum(run["window_examples"]) < 2 * ROWS


def test_the_batch_is_that_of_all_replicas_and_the_micro_batch_that_of_each(found):
    sizes = {
        name: [(r["replicas"], r["micro_batch_size"], r["accumulation_steps"]) for r in runs]
        for name, runs in found.items()
        if name in ("one", "two", "whole", "auto")
    }
    assert sizes == {
        "one": [(1, 4, 2), (1, 4, 8)],
        "two": [(2, 4, 1), (2, 4, 4)],
        "whole": [(2, 4, 1), (2, 16, 1)],
        # All of a batch of 64 fits, which is 32 for each of two.
        "auto": [(2, 32, 1)],
    }


def test_two_replicas_learn_what_one_device_learns(found):
    for one, two in zip(found["one"], found["two"], strict=True):
        for first, second in zip(one["epochs"], two["epochs"], strict=True):
            assert first["metrics"]["loss"] == pytest.approx(second["metrics"]["loss"], rel=1e-3)


def test_accumulated_replicas_learn_what_whole_ones_do(found):
    for parts, whole in zip(found["two"], found["whole"], strict=True):
        for first, second in zip(parts["epochs"], whole["epochs"], strict=True):
            assert first["metrics"]["loss"] == pytest.approx(second["metrics"]["loss"], rel=1e-5)


def test_a_batch_smaller_than_the_replicas_is_refused(found):
    assert "leave the sizes below 2 out" in found["few"]
