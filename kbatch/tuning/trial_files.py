"""The sidecar files of a search: kbatch.json of the project and of each trial."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
from keras_tuner.src.engine import tuner_utils

from kbatch.instruments.environment import read_environment
from kbatch.records.execution import ExecutionRecord
from kbatch.records.json_files import NewerRecordError, RecordError, read_record, write_record
from kbatch.records.loading import RECORD_NAME
from kbatch.records.study import SearchRecord
from kbatch.records.target import COST_NAMES
from kbatch.records.trial import Objective, TrialRecord
from kbatch.records.usage import USAGE_METRICS
from kbatch.training.errors import InputError

# What kbatch measures is of the whole run, and stands in the record already, in full.
_MEASURED = ("samples_per_second", *COST_NAMES, *USAGE_METRICS)


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
    def trial_id(self) -> str:
        """keras-tuner's identifier of the trial."""
        return self._trial.trial_id

    @property
    def folder(self) -> Path:
        """Folder of the trial."""
        return self._file.parent

    @property
    def objective(self) -> Objective:
        """What the search optimises."""
        return self._objective

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
        if not compare_settings(self._project, settings):
            _write(SearchRecord(settings, read_environment()), self._project / RECORD_NAME)

    def record(self) -> TrialRecord | None:
        """Reads what there is of the trial, None where it is missing, damaged or another's.

        Raises:
            NewerRecordError: If a newer kbatch wrote it.
        """
        try:
            record = read_record(TrialRecord, self._file)
        except NewerRecordError:
            raise
        except RecordError:
            return None
        mine, found = self._values(), record.hyperparameters
        # Training may have declared more of them since.
        return record if all(mine[n] == found[n] for n in mine.keys() & found.keys()) else None

    def begin_attempt(self) -> tuple[ExecutionRecord, ...]:
        """Drops what an interrupted attempt left unfinished.

        Returns:
            The executions that completed, which need not run again.
        """
        record = self.record()
        found = record.executions if record else ()
        kept = tuple(itertools.takewhile(lambda e: e.status == "completed", found))
        kept = kept[: self.executions]
        if kept:
            self._write_all(kept)
        else:
            self._file.unlink(missing_ok=True)
        return kept

    def write(self, index: int, execution: ExecutionRecord) -> None:
        """Writes execution number `index` of the trial after the ones before it."""
        self._write_all((*self._before(index), execution))

    def _write_all(self, executions: tuple[ExecutionRecord, ...]) -> None:
        record = TrialRecord(self._trial.trial_id, self._values(), self._objective, executions)
        _write(record, self._file)

    def _values(self) -> dict[str, bool | int | float | str | None]:
        return {k: v for k, v in self._trial.hyperparameters.values.items() if _is_plain(v)}

    def _before(self, index: int) -> tuple[ExecutionRecord, ...]:
        if index == 0:
            return ()
        return read_record(TrialRecord, self._file).executions[:index]


def compare_settings(project: Path, settings: Mapping[str, object]) -> bool:
    """Compares the settings of a search with those that its directory holds.

    Args:
        project: The project directory.
        settings: Settings of the hypermodel.

    Returns:
        Whether the directory holds any.

    Raises:
        InputError: If it holds others.
        RecordError: If they cannot be read.
    """
    file = project / RECORD_NAME
    if not file.exists():
        return False
    difference = read_record(SearchRecord, file).difference(settings)
    if difference:
        raise InputError(
            f"The project directory {project} holds a search with other settings: give another "
            f"`project_name`, or `overwrite=True` to start over. Received: {difference}."
        )
    return True


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
