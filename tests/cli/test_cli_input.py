"""`kbatch input`, in this process; its files are written in a folder of their own."""

import re
import subprocess
import sys

import pytest

import kbatch
from kbatch.cli import main as cli

MODULE = """
import keras, numpy, tensorflow as tf

X, Y = numpy.zeros((40, 8), "float32"), numpy.zeros(40, "int64")

def build():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])

def forgetful():
    build()

def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

def sized(batch_size):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)

def stream():
    yield X, Y

dataset = data()
arrays = X, Y
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module of the user's, as the working directory."""
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run(folder, build, data, *more):
    words = ["input", f"{folder}:{build}", "--data", f"{folder}:{data}", "--budget", "0.3"]
    return cli.main([*words, *more])


@pytest.mark.parametrize(
    ("data", "more", "batch_size"),
    [
        ("data", (), 8),
        ("dataset", ("--no-remedies",), 8),
        ("sized", ("--batch-size", "10", "--no-remedies"), 10),
        ("arrays", ("--batch-size", "20", "-o", "elsewhere"), 20),
    ],
)
def test_text_record_and_figure(folder, tmp_path, capsys, data, more, batch_size):
    assert run(folder, "build", data, *more) == 0
    out = capsys.readouterr().out
    directory = tmp_path / ("elsewhere" if "-o" in more else "kbatch-input")
    profile = kbatch.InputPipelineProfile.load(directory / "input.json")
    assert profile.batch_size == batch_size
    assert f"\n{profile.verdict.capitalize()}: " in out
    assert "Train step alone" in out
    assert "/input.png" in out
    assert (directory / "input.png").stat().st_size > 10_000
    assert bool(profile.untried) is (data == "data")


@pytest.mark.parametrize(
    ("build", "data", "more", "words"),
    [
        ("missing", "data", (), "does not have"),
        ("build", "missing", (), "does not have"),
        ("number", "data", (), "must name a compiled model or a function.*number, a int"),
        ("forgetful", "data", (), "end with `return model`"),
        ("uncompiled", "data", (), "must be compiled"),
        ("build", "stream", (), "used up by reading.*a generator"),
        ("build", "sized", (), "give `batch_size`"),
        ("build", "number", (), "Give a `tf.data.Dataset`.*builtins.int"),
        ("build", "data", ("--budget", "-1"), "budget_s=-1"),
        ("build", "data", ("--cache-bytes", "-1"), "cache_bytes=-1"),
        ("build", "data", ("--batch-size", "0"), "batch_size.*0"),
    ],
)
def test_bad_input_is_told_in_a_line(folder, tmp_path, capsys, build, data, more, words):
    assert run(folder, build, data, *more) == 1
    err = capsys.readouterr().err
    assert err.startswith("kbatch: ")
    assert re.search(words, err)
    assert not (tmp_path / "kbatch-input").exists()


def test_a_wrong_name_is_refused_before_tensorflow_starts(folder):
    wrong = {
        f"build --data {folder}:data": "MODULE:BUILD.*package.module:function.*build",
        f"{folder}:build --data data": "--data.*package.module:function.*data",
        f"no_such_module:build --data {folder}:data": "not found from.*no_such_module:build",
    }
    code = f"""
import sys
from kbatch.cli import main as cli
for command in ("input", "max-batch"):
    for names in {list(wrong)!r}:
        assert cli.main([command, *names.split()]) == 1
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for line, words in zip(lines, [*wrong.values()] * 2, strict=True):
        assert re.search(words, line)
