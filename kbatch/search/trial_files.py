"""The sidecar files of a search: kbatch.json of the project and of each trial."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
from keras_tuner.src.engine import tuner_utils

from kbatch.device.environment import read_environment
from kbatch.errors import InputError
from kbatch.records.json_codec import NewerRecordError, RecordError, read_record, write_record
from kbatch.records.training_run import COST_NAMES, ExecutionRecord
from kbatch.records.usage import USAGE_METRICS
from kbatch.search.identity import check_identity, fit_facts, objective_facts
from kbatch.study.loading import RECORD_NAME, SearchIdentity
from kbatch.study.study import SearchRecord
from kbatch.study.trial import Objective, TrialRecord

# What kbatch measures is of the whole run, and stands in the record already, in full.
_MEASURED = ("samples_per_second", *COST_NAMES, *USAGE_METRICS)


class TrialFiles:
    """Writes what a trial showed beside keras-tuner's own files.

    keras-tuner keeps the best epoch only and averages executions away.
    """

    def __init__(self, tuner: Any, trial: Any):
        check_local(tuner.project_dir)
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

    def trainings_left(self, batch_sizes: Sequence[int]) -> float:
        """Forecast how many trainings are left that fewer examples at once may speed up.

        The best part of a batch is a half of the largest one, or less where most gain: smaller
        batches go through whole.
        """
        left = getattr(self._tuner.oracle, "remaining_trials", lambda: None)()
        trials = max(1, len(batch_sizes) if left is None else left)
        large = sum(2 * size > batch_sizes[-1] for size in batch_sizes)
        return trials * self.executions * large / len(batch_sizes)

    @property
    def objective_names(self) -> tuple[str, ...]:
        """Names of the metrics that the search optimises, those of a model only."""
        return tuple(name for name in self._objective_names if name not in _MEASURED)

    @property
    def measured_names(self) -> tuple[str, ...]:
        """Names of what the search optimises and kbatch measures."""
        return tuple(name for name in self._objective_names if name in _MEASURED)

    def reported(self, results: Any) -> dict[str, float]:
        """Return the metrics that keras-tuner takes from what `fit` returned."""
        tuner_utils.validate_trial_results(results, self._tuner.oracle.objective, "fit()")
        metrics = tuner_utils.convert_to_metrics_dict(results, self._tuner.oracle.objective) or {}
        numbers = {name: float(v) for name, v in metrics.items() if np.size(v) == 1}
        return {name: v for name, v in numbers.items() if name not in _MEASURED}

    def check_settings(self, settings: Mapping[str, object]) -> None:
        """Write the settings of the search, or compares them with those found."""
        known = compare_settings(self._project, settings)
        if known is None or known.settings != settings:
            environment = read_environment() if known is None else known.environment
            _write(SearchRecord(settings, environment), self._project / RECORD_NAME)

    def check_identity(
        self,
        hypermodel: Any,
        hp: keras_tuner.HyperParameters,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> None:
        """Compare what a trial trains with the search of the directory, unless its tuner has.

        A tuner of keras-tuner knows nothing of it, and asks for no trial where a search is at its
        end; the space is the one that it keeps.
        """
        if getattr(self._tuner, "compares_searches", False):
            return

        def present(known: SearchIdentity | None) -> SearchIdentity:
            values, facts = hypermodel.described(known and known.hyperparameters)
            given = fit_facts(arguments, keywords, scheduled="tuner/epochs" in hp.values)
            return SearchIdentity(
                objective_facts(self._tuner.oracle.objective) | facts | given, values
            )

        check_identity(self._project, present, unchecked=None)

    def record(self) -> TrialRecord | None:
        """Read what there is of the trial, None where it is missing, damaged or another's."""
        try:
            record = read_record(TrialRecord, self._file)
        except NewerRecordError:
            raise
        except RecordError:
            return None
        if record.trial_id != self.trial_id:
            return None
        mine, found = self._values(), record.hyperparameters
        # Training may have declared more of them since.
        return record if all(mine[n] == found[n] for n in mine.keys() & found.keys()) else None

    def begin_attempt(self) -> tuple[ExecutionRecord, ...]:
        """Drop what an interrupted attempt left unfinished."""
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
        """Write execution number `index` of the trial after the ones before it."""
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


def check_local(project: str) -> None:
    """Check that a project directory lies in the file system."""
    if "://" in str(project):
        raise InputError(
            "kbatch writes its records to local directories only: give a local `directory`. "
            f"Received: {project}."
        )


def compare_settings(project: Path, settings: Mapping[str, object]) -> SearchRecord | None:
    """Compare the settings of a search with those that its directory holds."""
    found = recorded_search(project)
    difference = None if found is None else found.difference(settings)
    if difference:
        raise InputError(
            f"The project directory {project} holds a search with other settings: give another "
            f"`project_name`, or `overwrite=True` to start over. Received: {difference}."
        )
    return found


def recorded_search(project: Path) -> SearchRecord | None:
    """Read what holds for all trials of the search in a directory, None where there is none."""
    file = project / RECORD_NAME
    return read_record(SearchRecord, file) if file.exists() else None


def trial_files(callbacks: Any) -> TrialFiles | None:
    """Find the trial behind the callbacks that a tuner hands to `HyperModel.fit`.

    keras-tuner gives `fit` no trial; its own callback knows it.
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
