"""What a worker process imports, and what it does not."""

import os
import subprocess
import sys

# Python's own modules that unpickling and tracebacks import.
HIDING = ("pickle", "tokenize", "struct", "copyreg", "linecache")
CODE = """
from kbatch.device.worker import Worker
import beside
with Worker() as worker:
    print(worker.call(beside.answer))
"""


def folder_with_traps(folder):
    """Modules that hide standard ones and leave a file when they run, and one of the user's own."""
    folder.mkdir()
    for name in HIDING:
        (folder / f"{name}.py").write_text(
            f"import pathlib; pathlib.Path({str(folder)!r}, {name!r} + ' ran').touch()"
        )
    (folder / "beside.py").write_text("def answer():\n    return 42\n")
    return folder


def run(words, folder, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment | {"PYTHONPATH": root} | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_of_the_working_directory_do_not_run_in_a_worker(tmp_path):
    """The parent is a script elsewhere that adds the folder behind all else, to import from it."""
    folder = folder_with_traps(tmp_path / "shared")
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.append('')\n{CODE}")
    assert run([sys.executable, script], folder) == "42\n"
    assert list(folder.glob("* ran")) == []


def test_a_module_beside_the_script_travels(tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    (tmp_path / "script.py").write_text(CODE)
    (tmp_path / "elsewhere").mkdir()
    assert run([sys.executable, tmp_path / "script.py"], tmp_path / "elsewhere") == "42\n"


def test_a_module_of_the_working_directory_travels(tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    assert run([sys.executable, "-c", CODE], tmp_path) == "42\n"
