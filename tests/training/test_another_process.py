"""What needs another process: replicas, and fingerprints that are equal in any."""

import json
import os
import subprocess
import sys

import pytest
from test_fingerprint import fingerprints

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def another_process():
    """What `mirrored_training.py` prints: one start of TensorFlow for all that needs a process."""
    # It ends before garbage matters, and TensorFlow is imported a fifth faster without collections.
    code = "import gc; gc.disable(); import mirrored_training; mirrored_training.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_replicas_train_as_stock_mirrored_strategy_does(another_process):
    assert "batch_normalization (BatchNormalization); the loss" in another_process["warned of"][0]
    for name in ("float32", "mixed_float16"):
        result, tolerance = another_process[name], 2e-3 if "float16" in name else 1e-6
        assert result["weights"] <= tolerance, name
        assert result["loss"] <= max(tolerance, 1e-5), name
        assert result["updates"] == 2 * 3, name
        assert result["warned"] == [], name


def test_the_exact_mode_is_refused_on_two_replicas(another_process):
    assert "needs one device" in another_process["refused"]


def test_the_fingerprints_of_another_process_are_the_same(another_process):
    assert another_process["fingerprints"] == fingerprints()
