import keras
import pytest
from figure_studies import max_batch_result

import kbatch
from kbatch.cli import main as cli

MODULE = """
import keras, numpy as np

def build():
    model = keras.Sequential([
        keras.layers.Input((64,)),
        *(keras.layers.Dense(256, activation="relu") for _ in range(8)),
        keras.layers.Dense(10, activation="softmax"),
    ])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model

def narrow():
    model = keras.Sequential([
        keras.layers.Input((64,)),
        *(keras.layers.Dense(32, activation="relu") for _ in range(16)),
        keras.layers.Dense(10, activation="softmax"),
    ])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model

def data():
    return np.zeros((30_000, 64), "float32"), np.zeros(30_000, int)

def few():
    return np.zeros((37, 64), "float32"), np.zeros(37, int)

def uncompiled():
    return keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])

def broken():
    raise ValueError("the file is not there")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "given_training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_passes_its_flags_on_prints_the_answer_and_writes_it(
    folder, capsys, monkeypatch
):
    given = {}

    def found(build, x, y, **arguments):
        given.update(arguments, policy=keras.config.dtype_policy().name, shape=x.shape)
        return max_batch_result()

    monkeypatch.setattr("kbatch.memory.find.find_max_batch_size", found)
    monkeypatch.setenv("COLUMNS", "200")  # No text is folded.
    words = ["max-batch", "given_training:narrow", "--data", "given_training:data"]
    words += ["--limit", "32MiB", "--window", "0.5", "0.6", "--max", "20", "--inference"]
    assert cli.main([*words, "--policy", "mixed_bfloat16", "-o", "found.json"]) == 0
    assert given == {
        "memory_window": (0.5, 0.6),
        "memory_limit_bytes": 32 * 2**20,
        "max_batch_size": 20,
        "training": False,
        "policy": "mixed_bfloat16",
        "shape": (30_000, 64),
    }
    assert kbatch.MaxBatchSizeResult.load(folder / "found.json") == max_batch_result()
    printed = capsys.readouterr().out
    answer = max_batch_result().max_batch_size
    assert f"Largest batch for training: {answer:,} examples" in printed
    assert printed.count("fresh process") == 1
    assert printed.endswith("result: found.json\n")


@pytest.mark.slow
def test_flags_bound_a_search_whose_runs_are_printed(folder, capsys):
    words = ["max-batch", "given_training.py:build", "--data", "given_training:few", "--inference"]
    words += ["--policy", "mixed_bfloat16"]
    assert cli.main([*words, "--limit", "1GiB", "--max", "20", "-o", "found.json"]) == 0
    printed = capsys.readouterr().out
    found = kbatch.MaxBatchSizeResult.load(folder / "found.json")
    fresh = [probe for probe in found.probes if probe.purpose == "fresh process"]
    assert printed.count("fresh process") == len(fresh) >= 1
    assert "per example" in printed
    assert "Largest batch for inference: 20 examples" in printed
    assert "under mixed_bfloat16" in printed
    assert "reached `max_batch_size`" in printed


@pytest.mark.slow
def test_a_model_that_is_not_compiled_is_told_in_a_line(folder, capsys):
    assert cli.main(["max-batch", "given_training:uncompiled", "--data", "given_training:few"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kbatch: The model must be compiled: call `model.compile(")


@pytest.mark.slow
def test_a_build_function_that_raises_is_told_with_its_place(folder, capsys):
    words = ["max-batch", "given_training:broken", "--data", "given_training:few"]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("kbatch: the file is not there\n")
    assert "in broken" in error
