"""Runs Keras's own tests of training with the accumulating step underneath.

`python tests/keras_trainer_tests.py [FOLDER [EXPRESSION]]`: the folder has Keras's test files, by
default those of the installed Keras; the expression chooses tests as `pytest -k` does. Each model
that a test compiles accumulates in micro-batches of 3, unless it has a `train_step` of its own.
Counted are the tests that train a model and pass with Keras's own step.
"""

import functools
import importlib.util
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer

import kbatch
import kbatch.training.model
from kbatch.training.model import user_step

VERSION = "3.15.1"
FILES = ("trainer_test.py",)
MICRO_BATCH_SIZE = 3
TRAINING = "not predict and not evaluate and not without_training"


class Outcomes:
    """A plugin of pytest: what each test came out as, and which of them trained a model."""

    def __init__(self):
        self.passed, self.failed, self.trained = set(), {}, set()
        self.running = ""

    def pytest_runtest_setup(self, item):
        self.running = item.name

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("::")[-1]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[name] = (crash.message if crash else str(report.longrepr)).splitlines()[0]
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def outcomes(files, chosen: str, *, accumulated: bool) -> Outcomes:
    """Run test files, with Keras's own step or with micro-batches."""
    found = Outcomes()
    compiled, fit, train = Trainer.compile, TensorFlowTrainer.fit, TensorFlowTrainer.train_on_batch

    def compiling(self, *args, **kwargs):
        compiled(self, *args, **kwargs)
        if accumulated and user_step(self) is None:
            kbatch.accumulate_gradients(self, MICRO_BATCH_SIZE)

    def training(function):
        @functools.wraps(function)  # kbatch reads what `fit` takes.
        def trained(self, *args, **kwargs):
            found.trained.add(found.running)
            return function(self, *args, **kwargs)

        return trained

    with pytest.MonkeyPatch.context() as patch:
        # Models of these tests are a layer and this trainer; those of people are a `keras.Model`.
        patch.setattr(kbatch.training.model, "check_compiled", lambda model: None)
        patch.setattr(Trainer, "compile", compiling)
        patch.setattr(TensorFlowTrainer, "fit", training(fit))
        patch.setattr(TensorFlowTrainer, "train_on_batch", training(train))
        if importlib.util.find_spec("jax") is None:  # It is imported, and used by another backend.
            patch.setitem(sys.modules, "jax", types.ModuleType("jax"))
        options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:warnings"]
        options += ["--import-mode=importlib", "--no-header", "--no-summary", "--tb=short"]
        options += ["-k", chosen]
        pytest.main([*options, *map(str, files)], plugins=[found])
    return found


def main(folder: Path, chosen: str = TRAINING) -> int:
    """Print how many tests pass, and return 1 where one fails."""
    if keras.__version__ != VERSION:
        print(f"These tests are of Keras {VERSION}. Received: Keras {keras.__version__}.")
        return 1
    files = [folder / name for name in FILES]
    found = outcomes(files, chosen, accumulated=True)
    # Those that do not pass count only if they do with Keras's own step.
    plain = outcomes(files, chosen, accumulated=False)
    passed = found.passed & found.trained
    failed = sorted((plain.passed & plain.trained) - passed)
    if not passed and not failed:
        print(f"No test was collected that trains a model. Received: {folder}.")
        return 1
    for name in failed:
        print(f"FAILED: {name}: {found.failed[name]}")
    print(f"{len(passed)} of {len(passed) + len(failed)} tests pass that train a model.")
    return 1 if failed else 0


if __name__ == "__main__":
    # A few steps take less time than to optimise each graph for them.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    installed = Path(keras.__file__).parent / "src" / "trainers"
    folder = Path(sys.argv[1]) if sys.argv[1:] else installed
    sys.exit(main(folder, *sys.argv[2:3]))
