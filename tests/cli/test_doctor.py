import os
import subprocess
import sys

import pytest

from kbatch.cli.doctor import Finding, examination_text

OK = Finding("keras", "ok", "3.15.1")
MISSING = Finding("tensorboard", "missing", "not installed", "pip install 'tensorboard>=2.20'")


def doctor(**variables):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kbatch", "doctor"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_each_finding_has_a_line_and_the_command_stands_below_it():
    lines = examination_text((OK, MISSING)).splitlines()
    assert lines[0].split() == ["ok", "keras", "3.15.1"]
    assert lines[1].split() == ["missing", "tensorboard", "not", "installed"]
    assert lines[2].strip() == "$ pip install 'tensorboard>=2.20'"
    assert lines[-1] == "missing: tensorboard"


@pytest.mark.slow
def test_this_machine_is_examined():
    done = doctor(KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    for topic in ("packages", "GPU", "memory", "dtype policy"):
        assert f" {topic} " in done.stdout
    assert "as fast as float32" in done.stdout


def test_what_is_missing_gives_status_1_and_its_command():
    done = doctor(KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "$ export KERAS_BACKEND=tensorflow" in done.stdout
    assert "missing: backend" in done.stdout
    assert "dtype policy" not in done.stdout
