"""Studies read back from their files, with the identity of their search, without TensorFlow."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kbatch.records.json_codec import RecordError, printable, read_json, read_record, shown
from kbatch.study.study import GOODPUT_NAME, GoodputRecord, SearchRecord, Study
from kbatch.study.trial import TrialRecord

RECORD_NAME = "kbatch.json"


class _HasProjectDir(Protocol):
    """A keras-tuner tuner; the settings of its hypermodel are read where it has any."""

    @property
    def project_dir(self) -> str: ...


def load_study(tuner_or_directory: "_HasProjectDir | str | Path") -> Study:
    """Read the study of a search.

    A trial whose file is broken, impossible (no number may exceed 1e100), of another trial or of a
    newer kbatch is left out and named in `Study.problems`; the others load.

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
    tuner, path = None, tuner_or_directory
    if not isinstance(path, (str, Path)):
        tuner, path = path, path.project_dir
    path = Path(path)
    if path.is_file():
        return read_record(Study, path)
    study = _read_project(path)
    if not (study.trials or study.problems or study.search):
        raise FileNotFoundError(
            f"There is no kbatch study in {path}: `load_study` needs the project directory of a "
            "search (`directory/project_name`) whose hypermodel is a `kbatch.BatchSizeHyperModel`. "
            f"{_suggestion(path)}Received: {str(path)!r}."
        )
    settings = getattr(getattr(tuner, "hypermodel", None), "settings", None)
    difference = study.search.difference(settings) if study.search and settings else None
    if difference:
        # keras-tuner reloads a finished search without a word, and runs nothing.
        raise RecordError(
            f"{path} holds an older search with other settings, and the tuner ran none of its own: "
            "give another `project_name`, or `overwrite=True` to start over (`load_study` with the "
            f"directory reads the older one). Received: {difference}."
        )
    return study


def _read_project(path: Path) -> Study:
    problems: list[str] = []

    def read(kind, file):
        # A link that leads nowhere is a lost record, which no other test would see.
        if not os.path.lexists(file):
            return None
        try:
            return read_record(kind, file)
        except RecordError as error:
            problems.append(str(error))

    search = read(SearchRecord, path / RECORD_NAME)
    trials = []
    for folder in sorted(path.glob("trial_*")):
        trial = read(TrialRecord, file := folder / RECORD_NAME)
        if trial and folder.name != f"trial_{trial.trial_id}":
            problems.append(f"{file} is left out: it holds trial {shown(trial.trial_id)}.")
        elif trial:
            trials.append(trial)
    trials.sort(key=lambda trial: (trial.batch_size, trial.trial_id))
    problems += _unrecorded(path)
    identity = read(SearchIdentity, path / IDENTITY_NAME)
    problems += identity.notes if identity else ()
    goodput = read(GoodputRecord, path / GOODPUT_NAME)
    # A folder's name may hold bytes that are no text, and lines that would break a title.
    name = " ".join(printable(os.path.basename(os.path.realpath(path))).split())
    return Study(name, tuple(trials), search, tuple(map(printable, problems)), goodput)


def _unrecorded(path: Path) -> list[str]:
    """Word keras-tuner's trials that ended before kbatch saw them, in building the model."""
    lines = []
    for file in sorted(path.glob("trial_*/trial.json")):
        if (file.parent / RECORD_NAME).exists():
            continue
        try:
            trial = read_json(file)
            status, message = trial["status"], trial.get("message") or ""
        except (RecordError, AttributeError, KeyError, TypeError):
            continue
        if status in ("FAILED", "INVALID"):
            last = [line for line in str(message).splitlines() if line.strip()][-1:]
            lines.append(f"{file.parent.name} failed before training: {''.join(last)[:200]}")
    return lines


def _suggestion(path: Path) -> str:
    """Name a study that lies one folder below, where people often point to."""
    for file in sorted(path.glob(f"*/{RECORD_NAME}")):
        try:
            if read_json(file)["kind"] == SearchRecord.__name__:
                return f"One lies in {file.parent}. "
        except (RecordError, KeyError, TypeError):
            continue
    return ""


IDENTITY_NAME = "kbatch-search.json"


@dataclasses.dataclass(frozen=True)
class SearchIdentity:
    """What decides the results of a search, written once when it begins."""

    facts: Mapping[str, str]  # What was given; "optimizer.epsilon" is a part of "optimizer".
    hyperparameters: Mapping[str, bool | int | float | str | None]  # That the model was built with.
    notes: tuple[str, ...] = ()  # What a reader must know, such as trials that were run again.

    def difference(self, present: "SearchIdentity") -> str | None:
        """Return how the present search differs from this one, None where it does not."""
        names = [*self.facts, *(name for name in present.facts if name not in self.facts)]
        differing = [n for n in names if self.facts.get(n) != present.facts.get(n)]
        # Another optimizer has other parts.
        told = [n for n in differing if n.rpartition(".")[0] not in differing]
        pairs = [(n, self.facts.get(n, "none"), present.facts.get(n, "none")) for n in told]
        return "; ".join(f"{n}: {then} then, {now} now" for n, then, now in pairs) or None

    def with_note(self, note: str) -> "SearchIdentity":
        """Return the identity with another note, unless it has that one."""
        notes = self.notes if note in self.notes else (*self.notes, note)
        return dataclasses.replace(self, notes=notes)
