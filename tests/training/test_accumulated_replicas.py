import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 1e-6), ("mixed_float16", 2e-3)])
def test_two_replicas_train_as_stock_mirrored_strategy_does(policy, tolerance):
    script = TESTS / "training" / "mirrored_training.py"
    done = subprocess.run(
        [sys.executable, str(script), policy],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name, result in json.loads(done.stdout.splitlines()[-1]).items():
        assert result["weights"] <= tolerance, name
        assert result["loss"] <= max(tolerance, 1e-5), name
        assert result["updates"] == 2 * 3, name
