import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def another_process():
    """What `mirrored_training.py` prints: one start of TensorFlow for all that needs a process."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "training" / "mirrored_training.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
