import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_two_replicas_train_as_stock_mirrored_strategy_does():
    script = TESTS / "training" / "mirrored_training.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert "batch_normalization (BatchNormalization); the loss" in results.pop("warned of")[0]
    for name, result in results.items():
        tolerance = 2e-3 if "float16" in name else 1e-6
        assert result["weights"] <= tolerance, name
        assert result["loss"] <= max(tolerance, 1e-5), name
        assert result["updates"] == 2 * 3, name
        assert result["warned"] == [], name
