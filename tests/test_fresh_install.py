"""`pip install .` into an empty environment gives a demo that works."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*words, cwd):
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_clean_clone_installs_and_runs_the_demo(tmp_path):
    run("git", "clone", "--quiet", str(ROOT), "clone", cwd=tmp_path)
    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    binaries = tmp_path / "environment" / "bin"
    install = ("install", "--quiet", "--no-compile")  # The demo imports a part of what it installs.
    run(str(binaries / "python"), "-m", "pip", *install, "./clone[demo]", cwd=tmp_path)
    printed = run(str(binaries / "kbatch"), "demo", "--quick", "--batch-sizes", "64", cwd=tmp_path)
    assert "kbatch-demo/report.html" in printed
    assert (tmp_path / "kbatch-demo" / "report.html").stat().st_size > 10_000
