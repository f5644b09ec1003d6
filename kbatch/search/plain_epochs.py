"""Epochs by plain `fit` after a search: what people get, and what tells sizes apart in time.

They are those of the base size and of the one that the study names, and of certified sizes whose
times the executions do not tell apart.
"""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.records.json_codec import write_record
from kbatch.records.search import PLAIN_NAME, PlainEpochs
from kbatch.search.steps_per_execution import set_steps
from kbatch.study.study import load_study
from kbatch.study.trial import TrialRecord
from kbatch.training.data.training_data import TrainingData
from kbatch.training.learning_rate import apply_settings
from kbatch.training.state import kept_seeds

# Seconds of an epoch at the slower of both; of a longer one a part is timed.
_MOST_S = 1.5
# Epochs of each size, in turns; the shortest counts. More where they tell sizes apart.
_EPOCHS, _MORE_EPOCHS = 2, 4
# The share of the time of all trainings that these epochs and their tracing may take, and the share
# where they tell sizes apart. A short search has no time for them.
_MOST_SHARE, _MORE_SHARE = 0.05, 0.2
# With fewer batches, one batch more or less would change the time.
_FEWEST_BATCHES = 4


def measure_plain_epochs(
    tuner: Any, given: TrainingData, *, most_share: float | None = None
) -> None:
    """Time the sizes in turns with the settings of their trials, and keep it with the search."""
    project = Path(tuner.project_dir)
    study = load_study(project)
    found = study.decide()
    wanted = {found.base_batch_size, found.batch_size, *found.alike_in_time}
    trials = [trial for trial in found.trials if trial.batch_size in wanted]
    sizes, known = tuple(trial.batch_size for trial in trials), study.plain_epochs
    rates = [rate for trial in trials if (rate := trial.samples_per_second)]
    data = _training_arrays(given)
    if len(sizes) < 2 or len(rates) < len(sizes) or data is None or not tuner.hypermodel.stock_fit:
        return
    if known is not None and set(sizes) <= set(known.batch_sizes):
        return
    spent_s = sum(run.total_s or 0.0 for trial in study.trials for run in trial.executions)
    turns, share = _EPOCHS, _MOST_SHARE
    if found.alike_in_time:
        turns, share = _MORE_EPOCHS, _MORE_SHARE
    left_s = (share if most_share is None else most_share) * spent_s
    slower, example_s = min(rates), sum(1 / rate for rate in rates)
    known_rows = len(keras.tree.flatten(data)[0])
    rows = int(min(known_rows, _MOST_S * slower, left_s / (turns * example_s)))
    fewest = _FEWEST_BATCHES * max(sizes)
    if rows < fewest:
        return
    with kept_seeds():
        models = []
        for trial in trials:
            hp = tuner.oracle.get_space().copy()
            hp.values = dict(trial.hyperparameters)
            model = apply_settings(tuner.hypermodel.build(hp), trial.executions[-1])
            models.append(tuner.hypermodel.graph.model(model))
        if traces := any(model.train_function is None for model in models):
            left_s -= sum(trial.executions[-1].first_step_s or 0.0 for trial in trials)
            rows = int(min(rows, left_s / (turns * example_s)))
        if rows < fewest:
            return
        x, y = ((keras.tree.map_structure(lambda part: part[:rows], one)) for one in data)
        try:
            epochs_s = [
                [_epoch_s(*one, x, y) for one in zip(models, trials, strict=True)]
                for _ in range(turns + traces)
            ]
        except tf.errors.ResourceExhaustedError:  # Beside the model that the search keeps.
            return
    least_s = tuple(np.min(epochs_s[traces:], axis=0).tolist())
    write_record(PlainEpochs(sizes, least_s, rows), project / PLAIN_NAME)


def _training_arrays(data: TrainingData) -> tuple[Any, Any] | None:
    """Return the rows that a search trains on, None where its data are no arrays."""
    parts = keras.tree.flatten((data.x, data.y))
    if data.y is None or not all(isinstance(part, np.ndarray) for part in parts):
        return None
    if data.sample_weight is not None or data.class_weight is not None:
        return None
    rows = int(len(parts[0]) * (1 - data.validation_split))
    return keras.tree.map_structure(lambda part: part[:rows], (data.x, data.y))


def _epoch_s(model: Any, trial: TrialRecord, x: Any, y: Any) -> float:
    steps = trial.executions[-1].steps_per_execution
    if steps is not None and model.steps_per_execution != steps:
        set_steps(model, steps)  # One graph serves several sizes, each with its own number.
    begun_s = time.perf_counter()
    model.fit(x, y, batch_size=trial.batch_size, verbose=0)
    return time.perf_counter() - begun_s
