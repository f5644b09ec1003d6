"""A trial that really runs out of memory although the probes did not.

`python test_late_memory.py FOLDER auto` searches in a process whose allocator has less memory than
the search was told. With `given` it searches with enough memory and the micro-batch of the former.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kbatch
from kbatch.device.memory import limited_cpu

TESTS = Path(__file__).parents[1]


def search(directory, name):
    import memory_models

    sizes, settings = (64, 512, 1024), {"memory_limit_bytes": 400 * 2**20}
    if name == "given":
        found = kbatch.load_study(directory / "auto").trials[-1].executions[0].micro_batch_size
        sizes, settings = (512, 1024), {"micro_batch_size": found}
    hypermodel = kbatch.BatchSizeHyperModel(
        memory_models.conv_net,
        sizes,
        dtype_policy="float32",
        base_batch_size=64,
        steps_per_execution=1,
        seed=0,
        **settings,
    )
    place = {"directory": directory, "project_name": name}
    validation = memory_models.images(64, seed=1)
    kbatch.BatchSizeTuner(hypermodel, "val_loss", strategy="grid", **place).search(
        *memory_models.images(1024), validation_data=validation, epochs=1, verbose=0
    )


@pytest.mark.slow
def test_search_out_of_memory_equals_a_search_with_the_smaller_micro_batch(tmp_path):
    """Probed with 400 MiB in a process that has 110 MiB."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "memory"), str(TESTS)])
    # Convolutions of oneDNN crash if memory runs out in one of their threads.
    environment = os.environ | {"PYTHONPATH": paths, "TF_ENABLE_ONEDNN_OPTS": "0"}
    runs = {}
    for name, limit in (("auto", limited_cpu(110 * 2**20)), ("given", {})):
        command = [sys.executable, __file__, str(tmp_path), name]
        ended = subprocess.run(command, env=environment | limit, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        trials = kbatch.load_study(tmp_path / name).trials
        runs[name] = {trial.batch_size: trial.executions[0] for trial in trials}
    small, middle, large = runs["auto"].values()
    assert [run.status for run in (small, middle, large)] == ["completed"] * 3
    assert [run.batch_size_seen for run in (small, middle, large)] == [64, 512, 1024]
    assert small.micro_batch_size == 64
    assert middle.micro_batch_size < 512
    assert middle.examples_seen == large.examples_seen == 1024
    (note,) = [note for note in middle.notes if note.code == "memory_ran_out"]
    assert note.values["after"] >= middle.micro_batch_size
    # The plan was made once, and halved.
    assert small.plan == 1 < middle.plan <= large.plan
    halved, given = runs["auto"], runs["given"]
    assert halved[1024].micro_batch_size == given[1024].micro_batch_size
    for size in (512, 1024):
        for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
            mine, theirs = (run[size].epochs[-1].metrics[name] for run in (halved, given))
            assert mine == pytest.approx(theirs, rel=1e-5), name


if __name__ == "__main__":
    search(Path(sys.argv[1]), sys.argv[2])
