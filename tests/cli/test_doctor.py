import json
import os
import subprocess
import sys

import pytest

from kbatch.cli.machine import examination_text
from kbatch.device.doctor import Examination, Finding

OK = Finding("keras", "ok", "3.15.1")
MISSING = Finding("tensorboard", "missing", "not installed", "pip install 'tensorboard>=2.20'")
CODE = """
import argparse
from kbatch.cli.machine import add_doctor
parser = argparse.ArgumentParser()
add_doctor(parser.add_subparsers())
options = parser.parse_args()
options.run(options)
"""


def doctor(*words, **variables):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", CODE, "doctor", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_each_finding_has_a_line_and_the_command_stands_below_it():
    lines = examination_text(Examination((OK, MISSING), (), None)).splitlines()
    assert lines[0].split() == ["ok", "keras", "3.15.1"]
    assert lines[1].split() == ["missing", "tensorboard", "not", "installed"]
    assert lines[2].strip() == "$ pip install 'tensorboard>=2.20'"
    assert "missing: tensorboard" in lines
    assert "once that is fixed" in lines[-1]


def test_it_says_when_nothing_is_missing():
    text = examination_text(Examination((OK,), (), None))
    assert text.endswith("nothing that is needed is missing")


def test_a_long_finding_stays_in_its_column():
    text = examination_text(Examination((Finding("CPU", "warning", "word " * 40),), (), None))
    lines = text.splitlines()[:-2]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 100
    assert all(line.startswith(" " * 24) for line in lines[1:])


@pytest.mark.slow
def test_this_machine_is_examined():
    done = doctor("--json", KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    record = json.loads(done.stdout)["record"]
    topics = [finding["topic"] for finding in record["findings"]]
    for topic in ("python", "tensorboard", "backend", "GPU", "NVML", "memory", "CPU"):
        assert topic in topics
    assert topics[-1] == "dtype policy"
    assert record["policy_speeds"][0]["dtype_policy"] == "float32"
    assert record["environment"]["devices"]


def test_what_is_missing_gives_status_1_and_its_command():
    done = doctor(KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "$ export KERAS_BACKEND=tensorflow" in done.stdout
    assert "missing: backend" in done.stdout
    assert "dtype policy" not in done.stdout
