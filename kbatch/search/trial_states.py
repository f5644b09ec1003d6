"""The state of a search on disk: one whole, versioned trial.json a trial."""

import json
import warnings
from pathlib import Path
from typing import Any

from keras_tuner.src.engine.trial import Trial, TrialStatus

from kbatch.records.json_files import RecordError, read_json
from kbatch.records.whole_files import write_whole_file

ENDED = (TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.INVALID)
STATE_NAME = "trial.json"
STATE_VERSION = 1
_STATUSES = [status for name, status in vars(TrialStatus).items() if name.isupper()]
_VERSION_KEY = "kbatch_state"


def write_trial_state(trial: Any, project: Path) -> None:
    """Writes keras-tuner's state of a trial so that a reader sees the old one or the new one.

    keras-tuner's readers pass over the version that is added.
    """
    state = {_VERSION_KEY: STATE_VERSION, **trial.get_state()}
    text = json.dumps(state, default=_plain)
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trial_states(project: Path) -> list[Any]:
    """Reads the trials of a project, also those that another tuner of keras-tuner wrote.

    A damaged file is passed over with a warning: what it held is run again.

    Args:
        project: The project directory.

    Returns:
        The trials by their ids.

    Raises:
        RecordError: If a newer kbatch wrote one.
    """
    found = [_read(file) for file in sorted(project.glob(f"trial_*/{STATE_NAME}"))]
    return sorted((trial for trial in found if trial), key=lambda trial: trial.trial_id)


def _read(file: Path) -> Any:
    try:
        state = read_json(file)
        version = state.get(_VERSION_KEY, 0)
        if version <= STATE_VERSION:
            return _checked(Trial.from_state(state), file)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is damaged, its trial is run again: {error!r}.", stacklevel=2)
        return None
    raise RecordError(
        f"{file} has state version {version}, this kbatch reads up to {STATE_VERSION}: upgrade "
        "kbatch (pip install --upgrade kbatch)."
    )


def _checked(trial: Any, file: Path) -> Any:
    """Return the trial; its id names files, and its score is compared."""
    if f"trial_{trial.trial_id}" != file.parent.name:
        raise ValueError(f"it holds trial {trial.trial_id!r}")
    if trial.score is not None and not isinstance(trial.score, (int, float)):
        raise ValueError(f"its score is {trial.score!r}")
    if trial.status not in _STATUSES:
        raise ValueError(f"its status is {trial.status!r}")
    return trial


def _plain(value: Any) -> Any:
    """Gives NumPy's numbers, which scores may be, as Python's."""
    return value.item()
