"""The README's Python runs from top to bottom, as a reader would run it."""

import keras
import pytest
from code_blocks import ROOT, run_python
from sklearn.datasets import load_digits


def build():
    """The reader's own model."""
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    names = {"x": digits.data / 16, "y": digits.target, "build": build}
    run_python(ROOT / "README.md", names)
    assert names["study"].best_trial().metrics["val_accuracy"] > 0.7
    assert (tmp_path / "trials.png").stat().st_size > 10_000
    assert names["found"].max_batch_size == 1797
    assert (tmp_path / "throughput.png").stat().st_size > 10_000
    assert (tmp_path / "report.html").stat().st_size > 10_000
