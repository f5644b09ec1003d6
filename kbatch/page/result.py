"""The one shape of every result: an answer, a table, at most three notes, and figures.

The table is a DataFrame whose column names carry units, such as "step time (ms)". The columns
"X, low" and "X, high" are the interval of X and are shown behind its value. A column without any
value is not shown; why a value is unknown, which is None, stands in the column "outcome", or in
"verdict" for a study.
`table.attrs["answer"]` lists the labels of the rows that the answer names, and
`table.attrs["digits"]` the significant digits of a column where three are too few.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from kbatch.errors import InputError, RecordError
from kbatch.records.json_codec import DAMAGED, read_record, shown, write_record, write_whole_file
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kbatch.page.document import Figure

# Where the figures of each result are drawn. A module of this table has a function
# `figures_of(result)`. It is imported when a figure is asked for, so that no result imports its
# figures, which import the result.
FIGURES = {
    "Comparison": "kbatch.study.figures",
    "InferenceProfile": "kbatch.inference.figures",
    "InputPipelineProfile": "kbatch.input_pipeline.figure",
    "MaxBatchSizeResult": "kbatch.memory.figure",
    "Recommendation": "kbatch.recommendation.figure",
    "Study": "kbatch.study.figures",
    "TrainingProfile": "kbatch.throughput.figure",
}


class Result(ABC):
    """The base of a frozen dataclass of what was measured; whatever shows it reads this alone."""

    title: str  # What it is a result of, in a few words.
    answer: str  # The decision, in one sentence.
    use: str = ""  # How to act on it, in a sentence or two; empty if the answer says it.
    #: What it was measured with, a text each, ready to be read.
    settings: Mapping[str, str] = MappingProxyType({})
    noted: tuple[Note, ...]
    environment: EnvironmentRecord | None  # The machine, None if it was not recorded.

    @abstractmethod
    def table(self) -> "pd.DataFrame":
        """Return what was measured, a row each, as the head of this module says."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, from `noted` and from the data."""
        return most_important(self.noted)

    def figures(self) -> "tuple[Figure, ...]":
        """Return the figures for which there are data, the one that shows the decision first."""
        return importlib.import_module(FIGURES[type(self).__name__]).figures_of(self)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the figure that shows the answer, in Axes or in a new figure."""
        figures = self.figures()
        if not figures:
            raise ValueError(f"There is nothing to draw: {self.answer}")
        return figures[0].draw(ax)

    def save(self, path: Path | str) -> None:
        """Write the result as JSON."""
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a result that `save` wrote."""
        found = read_record(cls, Path(path))
        try:  # Values that do not fit each other are found where they are shown.
            _ = (str(found), found.use, found.settings, found.figures())
        except DAMAGED as error:
            raise RecordError(f"{printable(str(path))} is damaged: {shown(error)}.") from error
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answer}>"

    def __str__(self) -> str:
        """Write the answer, how to use it, the table and the notes for a terminal."""
        from kbatch.page.document import table_text

        above = [self.answer, *([self.use] if self.use else [])]
        table = table_text(self.table())
        notes = (f"Note: {note}" for note in self.notes)
        return "\n".join([*above, *(["", table, ""] if table else []), *notes]).rstrip()

    def _repr_html_(self) -> str:
        from kbatch.page.document import notebook_html

        return notebook_html(self)


def _compared(results: Sequence[Result]) -> tuple[list[Result], str]:
    """Put the comparison of several studies before them, or say why they are not compared."""
    given = [*results]
    for one in results:  # The studies of a comparison follow it.
        place = given.index(one) + 1
        given[place:place] = [each for each in getattr(one, "studies", ()) if each not in results]
    studies = [one for one in given if type(one).__name__ == "Study"]
    if len(studies) < 2 or any(hasattr(one, "studies") for one in given):
        return given, ""
    try:
        compare = importlib.import_module("kbatch.study.comparison").compare
        return [compare(studies), *given], ""
    except InputError as error:
        return given, f"The studies are not compared. {error}"


def write_report(results: Result | Sequence[Result], path: str | Path) -> tuple[Path, ...]:
    """Write what was found: the answer first, then figure, table, notes and how it was measured.

    A report of several studies begins with the table of `kbatch.compare`. HTML is one file that
    needs no network. Markdown has its figures in files beside it, `<name>-<figure>.png`.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.write_report(study, "digits.html")
    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> kbatch.write_report([study, profile], "digits.md")
    >>> kbatch.write_report(kbatch.compare(adam, sgd), "optimizers.html")

    Args:
        results: A `Study`, or what a function that measures returned, or a list of them, which
            makes one document. A `Comparison` is followed by its studies.
        path: File to write, with suffix `.html` or `.md`.

    Returns:
        The files written, the report last.

    Raises:
        ValueError: If the suffix is another one, a study is empty or the list is.
        OSError: If the folder cannot be written, with what to do.
    """
    from kbatch.page.document import document_files

    given = list(results) if isinstance(results, Sequence) else [results]
    if not given or not all(isinstance(one, Result) for one in given):
        raise ValueError(
            "A report needs a study or another result, or a list of them. "
            f"Received: results={results!r}."
        )
    path = Path(path)
    if path.suffix.lower() not in (".html", ".md"):
        raise ValueError(
            "A report's `path` must end in `.html` (one file) or `.md` (with figures beside "
            f"it). Received: path={str(path)!r}."
        )
    given, refusal = _compared(given)
    files = document_files(given, path, refusal)
    for file, data in files.items():
        write_whole_file(file, data)
    return tuple(files)
