"""The wheel holds the package alone; in an empty environment it runs the quickstart and a demo.

The environment has the oldest versions that setup.cfg allows: every other test has the newest.
"""

import configparser
import os
import re
import subprocess
import sys
import zipfile

import pytest
from code_blocks import READER, ROOT, blocks, brief


def run(*words, cwd):
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_oldest_versions_are_the_lower_bounds():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in required)
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert list(pins) == list(bounds)
    for name, version in pins.items():
        assert f"{version}.".startswith(f"{bounds[name]}."), name


@pytest.mark.slow
def test_the_wheel_of_a_clean_clone_installs_and_runs(tmp_path):
    run("git", "clone", "--quiet", str(ROOT), "clone", cwd=tmp_path)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", "dist", "./clone", cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("kbatch_tuner-*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == set(run("git", "ls-files", "kbatch", cwd=tmp_path / "clone").split())

    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    python = str(tmp_path / "environment" / "bin" / "python")
    # The code that runs imports a part of what is installed.
    oldest = ("--constraint", str(ROOT / "tests" / "oldest.txt"))
    run(python, *pip, "install", "--no-compile", *oldest, f"{wheel}[demo]", cwd=tmp_path)
    show = "import tensorflow, keras; print(tensorflow.__version__, keras.__version__)"
    assert run(python, "-c", show, cwd=tmp_path) == "2.18.0 3.14.0\n"
    quickstart = READER + brief(blocks(ROOT / "README.md", "python")[0])
    (tmp_path / "quickstart.py").write_text(quickstart)
    printed = run(python, "quickstart.py", cwd=tmp_path)
    assert re.search(r"^(Keep|Train with) batch size \d+ and learning rate ", printed, re.MULTILINE)
    assert "accuracy: " in printed.splitlines()[-1]  # Of the training that follows.
    command = (str(tmp_path / "environment" / "bin" / "kbatch"), "demo", "--quick")
    options = ("--batch-sizes", "64", "--policy", "float32")
    printed = run(*command, *options, cwd=tmp_path)
    assert "kbatch-demo/report.html" in printed
    assert (tmp_path / "kbatch-demo" / "report.html").stat().st_size > 10_000
