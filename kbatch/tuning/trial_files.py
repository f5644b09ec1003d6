"""The sidecar files of a search: kbatch.json of the project and of each trial."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
from keras_tuner.src.engine import tuner_utils

from kbatch.instruments.environment import read_environment
from kbatch.records.execution import ExecutionRecord
from kbatch.records.json_files import RecordError, read_record, write_record
from kbatch.records.loading import RECORD_NAME
from kbatch.records.study import SearchRecord
from kbatch.records.target import COST_NAMES
from kbatch.records.trial import Objective, TrialRecord
from kbatch.training.errors import InputError

# What kbatch measures besides the metrics of a model.
_MEASURED = ("samples_per_second", *COST_NAMES)


class TrialFiles:
    """Writes what a trial showed beside keras-tuner's own files.

    keras-tuner keeps the best epoch only and averages executions away.
    """

    def __init__(self, tuner: Any, trial: Any):
        if "://" in str(tuner.project_dir):
            raise InputError(
                "kbatch writes its records to local directories only: give a local `directory`. "
                f"Received: {tuner.project_dir}."
            )
        self._tuner = tuner
        self._trial = trial
        self._objective = _objective(tuner.oracle.objective)
        self._objective_names = _names(tuner.oracle.objective)
        self._project = Path(tuner.project_dir)
        self._file = Path(tuner.get_trial_dir(trial.trial_id)) / RECORD_NAME

    @property
    def project(self) -> Path:
        """The project directory."""
        return self._project

    @property
    def executions(self) -> int:
        """How many executions the tuner makes of each trial."""
        return getattr(self._tuner, "executions_per_trial", 1)

    @property
    def objective_names(self) -> tuple[str, ...]:
        """Names of the metrics that the search optimises, those of a model only."""
        return tuple(name for name in self._objective_names if name not in _MEASURED)

    @property
    def measured_names(self) -> tuple[str, ...]:
        """Names of what the search optimises and kbatch measures."""
        return tuple(name for name in self._objective_names if name in _MEASURED)

    def reported(self, results: Any) -> dict[str, float]:
        """Gives the metrics that keras-tuner takes from what `fit` returned.

        Args:
            results: A history, a dict of metrics or a number.
        """
        tuner_utils.validate_trial_results(results, self._tuner.oracle.objective, "fit()")
        metrics = tuner_utils.convert_to_metrics_dict(results, self._tuner.oracle.objective) or {}
        numbers = {name: float(v) for name, v in metrics.items() if np.size(v) == 1}
        return {name: v for name, v in numbers.items() if name not in _MEASURED}

    def check_settings(self, settings: Mapping[str, object]) -> None:
        """Writes the settings of the search, or compares them with those found.

        Raises:
            InputError: If the project directory holds a search with other settings.
            RecordError: If it cannot be read or written.
        """
        file = self._project / RECORD_NAME
        if not file.exists():
            _write(SearchRecord(settings, read_environment()), file)
            return
        difference = read_record(SearchRecord, file).difference(settings)
        if difference:
            raise InputError(
                f"The project directory {self._project} holds a search with other settings: give "
                "another `project_name`, or `overwrite=True` to start over. "
                f"Received: {difference}."
            )

    def write(self, index: int, execution: ExecutionRecord) -> None:
        """Writes execution number `index` of the trial after the ones before it."""
        executions = (*self._before(index), execution)
        values = {k: v for k, v in self._trial.hyperparameters.values.items() if _is_plain(v)}
        record = TrialRecord(self._trial.trial_id, values, self._objective, executions)
        _write(record, self._file)

    def _before(self, index: int) -> tuple[ExecutionRecord, ...]:
        if index == 0:
            return ()
        return read_record(TrialRecord, self._file).executions[:index]


def trial_files(callbacks: Any) -> TrialFiles | None:
    """Finds the trial behind the callbacks that a tuner hands to `HyperModel.fit`.

    keras-tuner gives `fit` no trial; its own callback knows it.

    Args:
        callbacks: The `callbacks` argument.

    Returns:
        The files of the trial, None when `fit` was not called by a tuner.
    """
    for callback in keras.tree.flatten(callbacks or []):
        if hasattr(callback, "tuner") and hasattr(callback, "trial"):
            return TrialFiles(callback.tuner, callback.trial)
    return None


def _write(record: SearchRecord | TrialRecord, file: Path) -> None:
    try:
        write_record(record, file)
    except OSError as error:
        raise RecordError(str(error)) from error


def _objective(objective: Any) -> Objective:
    if isinstance(objective, keras_tuner.Objective) and objective.direction in ("min", "max"):
        return Objective(objective.name, objective.direction)
    return Objective(getattr(objective, "name", "objective"), "min")


def _names(objective: Any) -> tuple[str, ...]:
    if objective.name == "default_objective":
        return ()  # The user's own `fit` returns the value itself.
    return tuple(part.name for part in getattr(objective, "objectives", [objective]))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
