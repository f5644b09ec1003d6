"""One epoch by plain `fit` at the size that a study names and at the base size: what people get."""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.records.json_codec import write_record
from kbatch.study.study import PLAIN_NAME, PlainEpochs, load_study
from kbatch.training.applied_settings import apply_settings
from kbatch.training.data.forms import FitData
from kbatch.training.state import kept_seeds

# Seconds of an epoch at the slower of both; of a longer one a part is timed.
_MOST_S = 1.5
# Of each, in turns; the least counts.
_EPOCHS = 2
# Of the time of all trainings, for all epochs and what is traced: a short search has none of it.
_MOST_SHARE = 0.05
# A batch more or less would change what is timed of fewer.
_FEWEST_BATCHES = 4


def measure_plain_epochs(tuner: Any, given: FitData, *, most_share: float = _MOST_SHARE) -> None:
    """Time both sizes in turns with the settings of their trials, and keep it with the search."""
    project = Path(tuner.project_dir)
    study = load_study(project)
    found = study.decide()
    sizes = found.base_batch_size or 0, found.batch_size or 0
    trials = [trial for size in sizes for trial in found.trials if trial.batch_size == size]
    known = study.plain_epochs
    data = _training_arrays(given)
    if sizes[0] == sizes[1] or len(trials) < 2 or data is None or not tuner.hypermodel.stock_fit:
        return
    rates = [rate for trial in trials if (rate := trial.samples_per_second)]
    if (known is not None and known.batch_sizes == sizes) or len(rates) < 2:
        return
    spent_s = sum(run.total_s or 0.0 for trial in study.trials for run in trial.executions)
    with kept_seeds():
        models = []
        for trial in trials:
            hp = tuner.oracle.get_space().copy()
            hp.values = dict(trial.hyperparameters)
            model = apply_settings(tuner.hypermodel.build(hp), trial.executions[-1])
            models.append(tuner.hypermodel.graph.model(model))
        left_s = most_share * spent_s
        if traces := any(model.train_function is None for model in models):
            left_s -= sum(trial.executions[-1].first_step_s or 0.0 for trial in trials)
        slower, example_s = min(rates), sum(1 / rate for rate in rates)
        part_s = max(0.0, min(_MOST_S, left_s / (_EPOCHS * example_s * slower)))
        rows = min(len(keras.tree.flatten(data)[0]), int(part_s * slower))
        if rows < _FEWEST_BATCHES * max(sizes):
            return
        x, y = ((keras.tree.map_structure(lambda part: part[:rows], one)) for one in data)
        try:
            epochs_s = [
                [_epoch_s(model, x, y, size) for model, size in zip(models, sizes, strict=True)]
                for _ in range(_EPOCHS + traces)
            ]
        except tf.errors.ResourceExhaustedError:  # Beside the model that the search keeps.
            return
    base_s, named_s = np.min(epochs_s[traces:], axis=0).tolist()
    write_record(PlainEpochs(sizes, (base_s, named_s), rows), project / PLAIN_NAME)


def _training_arrays(data: FitData) -> tuple[Any, Any] | None:
    """Return the rows that a search trains on, None where its data are no arrays."""
    parts = keras.tree.flatten((data.x, data.y))
    if data.y is None or not all(isinstance(part, np.ndarray) for part in parts):
        return None
    if data.sample_weight is not None or data.class_weight is not None:
        return None
    rows = int(len(parts[0]) * (1 - data.validation_split))
    return keras.tree.map_structure(lambda part: part[:rows], (data.x, data.y))


def _epoch_s(model: Any, x: Any, y: Any, batch_size: int) -> float:
    begun_s = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, verbose=0)
    return time.perf_counter() - begun_s
