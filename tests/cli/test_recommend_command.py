import pytest
from fake_clock import FakeClock

import kbatch
from kbatch.cli import main as cli

MODULE = """
import keras, numpy as np

def build():
    model = keras.Sequential([
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model

def data():
    x = np.random.default_rng(0).normal(size=(200, 8)).astype("float32")
    return x, np.argmax(x[:, :3], axis=1)

def stream():
    yield 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "asked_training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(build, data, *more):
    words = ["recommend", f"asked_training:{build}", "--data", f"asked_training:{data}"]
    return cli.main([*words, "--budget", "2", *more])


@pytest.mark.slow
def test_page_record_and_figure(folder, capsys, monkeypatch):
    # The budget counts readings of a clock, and not the start of a process on a busy machine.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=0.01))
    more = ("--base-batch-size", "16", "--limit", "1GiB", "--seed", "0")
    more = (*more, "--budget", "20")
    assert run("build", "data", *more, "-o", "found.json", "--figure", "limits.png") == 0
    printed = capsys.readouterr().out
    found = kbatch.Recommendation.load(folder / "found.json")
    assert (found.base_batch_size, found.pilot.seed) == (16, 0)
    assert found.memory.limit_bytes == 2**30
    assert str(found) in printed
    assert "measuring gradient noise: a pilot ..." in printed
    assert printed.endswith("record: found.json\nfigure: limits.png\n")
    assert (folder / "limits.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("build", "data", "more", "words"),
    [
        ("missing", "data", (), "does not have"),
        ("build", "stream", (), "Training data are arrays"),
        ("build", "data", ("--figure", "limits.gif"), "`--figure` must end in .png, .svg or .pdf"),
        ("build", "data", ("--base-batch-size", "0"), "`base_batch_size` must be a positive"),
        ("build", "data", ("--limit", "much"), "A size of memory"),
    ],
)
def test_mistakes_are_told_in_a_line(folder, capsys, build, data, more, words):
    assert run(build, data, *more) == 1
    error = capsys.readouterr().err
    assert error.startswith("kbatch: ")
    assert words in error
    assert not list(folder.glob("*.json"))
