"""The executions of a trial, run one after the other in this process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras_tuner.src.engine.tuner_utils import TunerCallback

from kbatch.search.budget_cap import capped
from kbatch.search.checkpoints import CHECKPOINT_NAME, BestWeights
from kbatch.search.fit_reporter import FitProgress, FitReporter
from kbatch.search.trial_files import TrialFiles


def run_executions(
    tell: Callable[[FitProgress], None],
    tuner: Any,
    trial: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> None:
    """Trains the model of a trial once an execution, from the first that has not completed.

    It ends at an execution that fails: the trial has failed then.

    Args:
        tell: Receives how far training is.
        tuner: The tuner.
        trial: The trial.
        arguments: Positional arguments of the search.
        keywords: Its keyword arguments.
    """
    files = TrialFiles(tuner, trial)
    completed = files.begin_attempt()
    weights = [_best_weights(tuner, files)] if tuner.keep_checkpoints else []
    keywords = dict(keywords)
    given = keras.tree.flatten(keywords.pop("callbacks", None) or [])
    for number in range(len(completed), files.executions):
        callbacks = capped(tuner._deepcopy_callbacks(given), tuner.time_cap_s)
        tuner._configure_tensorboard_dir(callbacks, trial, number)
        reporter = FitReporter(tell, execution=number, executions=files.executions)
        callbacks += [TunerCallback(tuner, trial), *weights, reporter]
        tuner.hypermodel.begin_execution(trial.hyperparameters, number)
        tuner._build_and_fit_model(trial, *arguments, callbacks=callbacks, **keywords)
        record = files.record()
        if record is None or record.status != "completed":
            return


def _best_weights(tuner: Any, files: TrialFiles) -> BestWeights:
    record = files.record()
    kept = record if (files.folder / CHECKPOINT_NAME).exists() else None
    return BestWeights(tuner.oracle.objective, files.folder, kept and kept.best_objective_value)
