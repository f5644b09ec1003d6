"""Epochs by plain `fit` after a search: what people get, and what separates sizes in time.

They are those of the base size and of the one that the study names, and of certified sizes whose
times the executions do not separate.
"""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kbatch.device.failures import ran_out_of_memory
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import PLAIN_NAME, PlainEpochs
from kbatch.study.study import load_study
from kbatch.study.trial import TrialRecord
from kbatch.training.data.training_data import TrainingData
from kbatch.training.state import kept_seeds
from kbatch.training.steps_per_execution import set_steps

# An epoch has as many examples as the slower size trains in so many seconds, or so many batches.
_MOST_S, _FEWEST_BATCHES = 1.5, 4
# The sizes are fitted in turns, the shortest of which counts: twice, and on for so many seconds.
_TURNS, _TURNS_S = 2, 1.0
# Seconds of steps, without those of the first execution, that show what the rest of an epoch takes.
_STRETCH_S = 0.05
# What a fit takes until then, and the share of the time of all trainings that all fits and their
# tracing may take. A very short search has no time for them.
_FIT_S, _MOST_SHARE = 0.15, 0.3


def measure_plain_epochs(
    tuner: Any, given: TrainingData, *, most_share: float = _MOST_SHARE
) -> None:
    """Time the sizes in turns with the settings of their trials, and keep it with the search."""
    data = _training_arrays(given)
    # TensorFlow 2.21 may crash where a fit ends early under a strategy.
    if data is None or not tuner.hypermodel.stock_fit or tuner.distribution_strategy is not None:
        return
    project = Path(tuner.project_dir)
    study = load_study(project)
    found, known = study.decide(), study.plain_epochs
    by_size = {trial.batch_size: trial for trial in found.trials}
    # The first are needed most.
    wanted = dict.fromkeys((found.base_batch_size, found.batch_size, *found.alike_in_time))
    trials = [by_size[size] for size in wanted if size in by_size]
    rates = [trial.samples_per_second for trial in trials]
    timed = known is not None and {trial.batch_size for trial in trials} <= {*known.batch_sizes}
    if timed or not all(rates):
        return
    left_s = most_share * sum(r.total_s or 0.0 for trial in study.trials for r in trial.executions)
    # Two executions of a large model may take longer.
    executed = [t.batch_size * (t.executions[-1].steps_per_execution or 1) for t in trials]
    fit_s = max([_FIT_S, *(2 * n / rate for n, rate in zip(executed, rates, strict=True) if rate)])
    trials = sorted(trials[: int(min(len(trials), left_s / fit_s))], key=lambda t: t.batch_size)
    if len(trials) < 2:
        return
    fewest = _FEWEST_BATCHES * trials[-1].batch_size
    slower = min(rate for rate in rates if rate)
    rows = int(min(len(keras.tree.flatten(data)[0]), max(fewest, _MOST_S * slower)))
    x, y = (keras.tree.map_structure(lambda part: part[:rows], one) for one in data)
    with kept_seeds():
        models = []
        for trial in trials:
            hp = tuner.oracle.get_space().copy()
            hp.values = dict(trial.hyperparameters)
            models.append(tuner.hypermodel.graph.model(tuner.hypermodel.build(hp)))
        if traces := any(model.train_function is None for model in models):
            left_s -= sum(trial.executions[-1].first_step_s or 0.0 for trial in trials)
        turns = int(min(_TURNS, left_s / (fit_s * len(trials)))) + traces
        if turns < 1 + traces:
            return
        epochs_s: list[list[float]] = []
        most_s = min(left_s, _TURNS_S)
        try:
            while len(epochs_s) < turns or np.sum(epochs_s[traces:]) < most_s:
                fits = zip(models, trials, strict=True)
                epochs_s.append([_epoch_s(*one, x, y, rows) for one in fits])
        except Exception as error:
            if ran_out_of_memory(error):  # Beside the model that the search keeps.
                return
            raise
    least_s = tuple(np.min(epochs_s[traces:], axis=0).tolist())
    sizes = tuple(trial.batch_size for trial in trials)
    write_record(PlainEpochs(sizes, least_s, rows), project / PLAIN_NAME)


def _training_arrays(data: TrainingData) -> tuple[Any, Any] | None:
    """Return the rows that a search trains on, None where its data are no arrays."""
    parts = keras.tree.flatten((data.x, data.y))
    if data.y is None or not all(isinstance(part, np.ndarray) for part in parts):
        return None
    if data.sample_weight is not None or data.class_weight is not None:
        return None
    split = data.validation_split if data.validation_data is None else None
    rows = int(len(parts[0]) * (1 - (split or 0.0)))
    return keras.tree.map_structure(lambda part: part[:rows], (data.x, data.y))


def _epoch_s(model: Any, trial: TrialRecord, x: Any, y: Any, rows: int) -> float:
    steps = trial.executions[-1].steps_per_execution
    if steps is not None and model.steps_per_execution != steps:
        set_steps(model, steps)  # One graph serves several sizes, each with its own number.
    part = EpochPart(-(-rows // trial.batch_size))
    begun_s = time.perf_counter()
    model.fit(x, y, batch_size=trial.batch_size, verbose=0, callbacks=[part])
    return time.perf_counter() - begun_s + part.rest_s


class EpochPart(keras.callbacks.Callback):
    """Ends an epoch of some steps once it is known what they take."""

    def __init__(self, steps: int):
        super().__init__()
        self.rest_s = 0.0  # What the steps that are left out take.
        self._steps = steps
        self._first: tuple[int, float] | None = None  # Steps and seconds at its end.

    def on_train_batch_end(self, batch: int, logs: Any = None):
        model: Any = self.model
        done, now_s = min(batch + 1, self._steps), time.perf_counter()
        before, begun_s = self._first = self._first or (done, now_s)
        if now_s - begun_s > _STRETCH_S:
            self.rest_s = (self._steps - done) * (now_s - begun_s) / (done - before)
            model.stop_training = True
