"""Studies read back from their files, without TensorFlow."""

import json
from pathlib import Path
from typing import Protocol

from kbatch.records.goodput import GOODPUT_NAME, GoodputRecord
from kbatch.records.json_files import RecordError, read_record
from kbatch.records.study import SearchRecord, Study
from kbatch.records.trial import TrialRecord

RECORD_NAME = "kbatch.json"


class _HasProjectDir(Protocol):
    """A keras-tuner tuner; the settings of its hypermodel are read where it has any."""

    @property
    def project_dir(self) -> str: ...


def load_study(tuner_or_directory: "_HasProjectDir | str | Path") -> Study:
    """Reads the study of a search.

    A trial whose file is broken or of a newer kbatch is left out and named in
    `Study.problems`; the others load.

    Args:
        tuner_or_directory: A keras-tuner tuner, its project directory
            (`directory/project_name`), or a file written by `Study.save`.

    Returns:
        The study.

    Raises:
        FileNotFoundError: If there is no kbatch record, with what to run.
        RecordError: If a file written by `Study.save` cannot be read, or a tuner found an older
            search with other settings in its directory, whose trials are not its own.
    """
    if not isinstance(tuner_or_directory, (str, Path)):
        return _study_of(tuner_or_directory)
    path = Path(tuner_or_directory)
    if path.is_file():
        return read_record(Study, path)
    study = _read_project(path)
    if study.trials or study.problems or study.search:
        return study
    raise FileNotFoundError(
        f"There is no kbatch study in {path}: `load_study` needs the project directory of a "
        "search (`directory/project_name`) whose hypermodel is a `kbatch.BatchSizeHyperModel`. "
        + _suggestion(path)
        + f"Received: {str(path)!r}."
    )


def _study_of(tuner: _HasProjectDir) -> Study:
    study = load_study(Path(tuner.project_dir))
    settings = getattr(getattr(tuner, "hypermodel", None), "settings", None)
    difference = study.search.difference(settings) if study.search and settings else None
    if difference:
        # keras-tuner reloads a finished search without a word, and runs nothing.
        raise RecordError(
            f"{tuner.project_dir} holds an older search with other settings, and the tuner ran "
            "none of its own: give another `project_name`, or `overwrite=True` to start over "
            "(`load_study` with the directory reads the older one). "
            f"Received: {difference}."
        )
    return study


def _read_project(path: Path) -> Study:
    problems: list[str] = []

    def read(kind, file):
        try:
            return read_record(kind, file)
        except RecordError as error:
            problems.append(str(error))
            return None

    search_file = path / RECORD_NAME
    search = read(SearchRecord, search_file) if search_file.exists() else None
    found = [read(TrialRecord, file) for file in sorted(path.glob(f"trial_*/{RECORD_NAME}"))]
    problems += _unrecorded(path)
    trials = sorted((t for t in found if t), key=lambda t: (t.batch_size, t.trial_id))
    goodput_file = path / GOODPUT_NAME
    goodput = read(GoodputRecord, goodput_file) if goodput_file.exists() else None
    return Study(path.resolve().name, tuple(trials), search, tuple(problems), goodput)


def _unrecorded(path: Path) -> list[str]:
    """Words keras-tuner's trials that ended before kbatch saw them, in building the model."""
    lines = []
    for file in sorted(path.glob("trial_*/trial.json")):
        if (file.parent / RECORD_NAME).exists():
            continue
        try:
            trial = json.loads(file.read_text(encoding="utf-8"))
            status, message = trial["status"], trial.get("message") or ""
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if status in ("FAILED", "INVALID"):
            last = [line for line in message.splitlines() if line.strip()][-1:]
            lines.append(f"{file.parent.name} failed before training: {''.join(last)[:200]}")
    return lines


def _suggestion(path: Path) -> str:
    """Names a study that lies one folder below, where people often point to."""
    for file in sorted(path.glob(f"*/{RECORD_NAME}")):
        if _holds_search(file):
            return f"One lies in {file.parent}. "
    return ""


def _holds_search(file: Path) -> bool:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("kind") == SearchRecord.__name__
    except (OSError, ValueError, AttributeError):
        return False
