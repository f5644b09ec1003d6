"""One epoch by plain `fit` at the size that a study names and at the base size: what people get."""

import inspect
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.records.json_codec import write_record
from kbatch.study.study import PLAIN_NAME, PlainEpochs, load_study
from kbatch.study.trial import TrialRecord
from kbatch.training.applied_settings import apply_settings
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.state import kept_seeds, seeded

_SIGNATURE = inspect.signature(keras.Model.fit)
# Seconds of an epoch at the slower of both; of a longer one a part is timed.
_MOST_S = 1.5
# Of each, of which the first traces; the least of the others counts.
_EPOCHS = 3
# Of the time of all trainings, for all that is done here: a short search has none of it.
_MOST_SHARE = 0.05
# A batch more or less would change what is timed of fewer.
_FEWEST_BATCHES = 4


def measure_plain_epochs(
    tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, most_share: float = _MOST_SHARE
) -> None:
    """Time both sizes in turns with the settings of their trials, and keep it with the search."""
    project = Path(tuner.project_dir)
    study = load_study(project)
    found = study.decide()
    sizes = found.base_batch_size or 0, found.batch_size or 0
    trials = [trial for size in sizes for trial in found.trials if trial.batch_size == size]
    known = study.plain_epochs
    data = _training_arrays(args, kwargs)
    if sizes[0] == sizes[1] or len(trials) < 2 or data is None or not tuner.hypermodel.stock_fit:
        return
    rates = [trial.samples_per_second for trial in trials]
    if (known is not None and known.batch_sizes == sizes) or None in rates:
        return
    (x, y), slowest = data, min(rate or 0.0 for rate in rates)
    rows = min(len(keras.tree.flatten(x)[0]), int(_MOST_S * slowest))
    spent_s = sum(run.total_s or 0.0 for trial in study.trials for run in trial.executions)
    first_s = sum(trial.executions[-1].first_step_s or 0.0 for trial in trials)
    needed_s = first_s + 2 * _EPOCHS * rows / slowest
    if rows < _FEWEST_BATCHES * max(sizes) or needed_s > most_share * spent_s:
        return
    cut: Any = keras.tree.map_structure(lambda part: part[:rows], (x, y))
    x, y = cut
    with kept_seeds():
        try:
            models = [_model(tuner, trial) for trial in trials]
            epochs_s = [
                [_epoch_s(m, x, y, size) for m, size in zip(models, sizes, strict=True)]
                for _ in range(_EPOCHS)
            ]
        except tf.errors.ResourceExhaustedError:  # Beside the model that the search keeps.
            return
    base_s, named_s = np.min(epochs_s[1:], axis=0).tolist()
    write_record(PlainEpochs(sizes, (base_s, named_s), rows), project / PLAIN_NAME)


def _training_arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the rows that a search trains on, None where its data are no arrays."""
    given = _SIGNATURE.bind_partial(None, *args, **kwargs).arguments
    x, y = given.get("x"), given.get("y")
    parts = keras.tree.flatten((x, y))
    if y is None or not all(isinstance(part, np.ndarray) for part in parts):
        return None
    if any(given.get(name) is not None for name in ("sample_weight", "class_weight")):
        return None
    rows = int(len(parts[0]) * (1 - given.get("validation_split", 0.0)))
    return keras.tree.map_structure(lambda part: part[:rows], (x, y))


def _model(tuner: Any, trial: TrialRecord) -> Any:
    hp, run = tuner.oracle.get_space().copy(), trial.executions[-1]
    hp.values = dict(trial.hyperparameters)
    with dtype_policy_scope(run.dtype_policy), seeded(run.seed):
        model = tuner.hypermodel._inner.build(hp)
        return apply_settings(model, run)


def _epoch_s(model: Any, x: Any, y: Any, batch_size: int) -> float:
    begun_s = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, verbose=0)
    return time.perf_counter() - begun_s
