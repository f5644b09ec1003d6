"""The identity of a search: what decides its results, and so what it may go on with."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from kbatch.records.json_files import RecordError, read_record

IDENTITY_NAME = "kbatch-search.json"


@dataclasses.dataclass(frozen=True)
class SearchIdentity:
    """What decides the results of a search, written once when it begins.

    Attributes:
        facts: What was given, as text by name; `"optimizer.epsilon"` is a part of `"optimizer"`.
        hyperparameters: Values that the model of `facts` was built with.
        notes: What a reader of the study must know, such as trials that were run again.
    """

    facts: Mapping[str, str]
    hyperparameters: Mapping[str, bool | int | float | str | None]
    notes: tuple[str, ...] = ()

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


def read_identity(project: Path) -> SearchIdentity | None:
    """Read the identity of the search in a project directory, None where there is none.

    Raises:
        RecordError: If it is damaged, or a newer kbatch wrote it.
    """
    file = project / IDENTITY_NAME
    return read_record(SearchIdentity, file) if file.exists() else None


def identity_notes(project: Path) -> tuple[str, ...]:
    """Read the notes of a search, none where its identity is missing or cannot be read."""
    try:
        found = read_identity(project)
    except RecordError as error:
        return (str(error),)
    return () if found is None else found.notes
