"""Searches that the tests of this folder share."""

import keras_tuner
import small_models as models

import kbatch
from kbatch.records.training_run import Plan
from kbatch.search.timed_fit import RunSettings
from kbatch.study.trial import Objective
from kbatch.training.build_function import has_stock_fit


def noted(study):
    """The codes of the notes of all trials."""
    return {note.code for trial in study.trials for note in trial.notes}


def hypermodel(build=models.mlp, batch_sizes=(8, 16, 32), **arguments):
    # With one step per execution, tests can count steps.
    defaults = {
        "micro_batch_size": 8,
        "dtype_policy": "mixed_float16",
        "learning_rate_scaling": "sqrt",
        # If 8 is the base size, its trial has the settings of the build function.
        "base_batch_size": 8 if 8 in batch_sizes else None,
        "steps_per_execution": 1,
        "seed": 0,
    }
    if isinstance(build, keras_tuner.HyperModel) and not has_stock_fit(build):
        defaults |= {"micro_batch_size": None, "learning_rate_scaling": None}
    return kbatch.BatchSizeHyperModel(build, batch_sizes, **(defaults | arguments))


def stock(build=models.stock, batch_sizes=(8, 16, 32), **arguments):
    """A hypermodel whose trials train in float32 with whole batches."""
    defaults = {"micro_batch_size": None, "dtype_policy": "float32"}
    return hypermodel(build, batch_sizes, **(defaults | arguments))


def tuner(directory, hypermodel, kind=keras_tuner.GridSearch, **arguments):
    defaults = {"objective": "val_accuracy", "project_name": "search"}
    if issubclass(kind, kbatch.BatchSizeTuner):
        defaults["strategy"] = "grid"
    return kind(hypermodel, directory=directory, **(defaults | arguments))


def search(directory, hypermodel, kind=keras_tuner.GridSearch, *, data=None, fit=None, **arguments):
    """Run a search of two epochs on 94 rows and return the tuner."""
    searched = tuner(directory, hypermodel, kind, **arguments)
    data = models.rows(94) if data is None else data
    defaults = {"validation_data": models.rows(40, seed=1), "epochs": 2, "verbose": 0}
    searched.search(*data, **(defaults | (fit or {})))
    return searched


def quick(directory, hypermodel, kind=keras_tuner.GridSearch, *, fit=None, **arguments):
    """Run a search of one epoch without validation, which is a third faster."""
    fit = {"epochs": 1, "validation_data": None} | (fit or {})
    return search(directory, hypermodel, kind, fit=fit, **({"objective": "accuracy"} | arguments))


PLAN = Plan(1, "float32", None, "given", 64, "")


def plan(batch_size=32, **changed):
    """Settings of a training run."""
    plain = {
        "number": 0,
        "seed": 0,
        "micro_batch_size": None,
        "validation_batch_size": 32,
        "largest_batch_size": batch_size,
        "metrics": (),
        "to_target": False,
        "objective": Objective("val_loss", "min"),
        "objective_parts": (),
        "plan": PLAN,
    }
    return RunSettings(batch_size=batch_size, **(plain | changed))
