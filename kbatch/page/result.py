"""The one shape of every result: an answer, a table, at most three notes, and figures.

The table is a DataFrame whose column names carry units, such as "step time (ms)". The columns
"X, low" and "X, high" are the interval of X and are shown behind its value. A column without any
value is not shown; why a value is unknown, which is None, stands in the column "outcome".
`table.attrs["answer"]` lists the labels of the rows that the answer names, and
`table.attrs["digits"]` the significant digits of a column where three are too few.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kbatch.errors import RecordError
from kbatch.page.numbers import environment_texts, format_number, setting
from kbatch.records.json_codec import (
    DAMAGED,
    printable,
    read_record,
    shown,
    write_record,
    write_whole_file,
)
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Numbers that somebody chose, which are written without trailing zeros.
_CHOSEN = {"learning rate", "weight decay"}
# A column of longer texts is none for a terminal.
_LONGEST = 60


class Figure(NamedTuple):
    """A figure that is yet to be drawn."""

    name: str  # For the name of its file.
    title: str
    height_in: float
    # Draws it in Axes, or in a new figure; its label describes it for those who do not see it.
    draw: "Callable[[Axes | None], Axes]"

    @classmethod
    def of(cls, plot: Any, result: Any, title: str, height_in: float, **options: Any) -> Self:
        """Offer what a public function draws of a result, under the function's own name."""
        name = plot.__name__.removeprefix("plot_").replace("_", "-")
        draw = functools.partial(plot, result, **options)
        return cls("-".join((name, *options.values())), title, height_in, draw)


class ShownColumn(NamedTuple):
    """A column of a table as people read it."""

    title: str
    numeric: bool  # Whether it holds numbers, which stand to the right.
    texts: list[str]
    values: list[Any]  # To sort by; None where there is none.


class Page(NamedTuple):
    """One result, as all its renderings show it."""

    title: str  # What it is a result of, in a few words.
    answer: str  # The decision, in one sentence.
    use: str  # How to act on it, empty where the answer says it.
    columns: list[ShownColumn]  # Of its table, those that have a value.
    named_rows: list[bool]  # Whether the answer names each row of it.
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]  # The one that shows the decision first, wide.
    settings: Mapping[str, str]  # What it was measured with.
    environment: Mapping[str, str]  # Machine and software; empty if not recorded.
    command: str | None  # The command line that measured it, None if it was not recorded.


class Result(ABC):
    """The base of a frozen dataclass of what was measured; whatever shows it reads this alone."""

    noted: tuple[Note, ...]
    environment: EnvironmentRecord | None  # The machine, None if it was not recorded.

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is a result of, in a few words."""

    @property
    @abstractmethod
    def answer(self) -> str:
        """The decision, in one sentence."""

    @abstractmethod
    def table(self) -> "pd.DataFrame":
        """Return what was measured, a row each, as the head of this module says."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, from `noted` and from the data."""
        return most_important(self.noted)

    @property
    def use(self) -> str:
        """How to act on the answer, in a sentence or two; empty where the answer says it."""
        return ""

    @property
    def settings(self) -> Mapping[str, str]:
        """What it was measured with, a text each, ready to be read."""
        return {}

    def figures(self) -> tuple[Figure, ...]:
        """Return the figures for which there are data, the one that shows the decision first."""
        return ()

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
        try:  # Values that do not fit each other are found where the page is made of them.
            found.page()
        except DAMAGED as error:
            raise RecordError(f"{printable(str(path))} is damaged: {shown(error)}.") from error
        return found

    def page(self) -> Page:
        """Return what all renderings show."""
        table = self.table()
        return Page(
            self.title,
            self.answer,
            self.use,
            shown_columns(table),
            named_rows(table),
            self.notes,
            self.figures(),
            self.settings,
            environment_texts(self.environment),
            self.environment.command if self.environment else None,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answer}>"

    def __str__(self) -> str:
        """Write the answer, the table and the notes for a terminal."""
        table = table_text(self.table())
        return "\n".join(
            [self.answer, *(["", table, ""] if table else []), *(f"Note: {n}" for n in self.notes)]
        ).rstrip()

    def _repr_html_(self) -> str:
        from kbatch.page.document import notebook_html

        return notebook_html(self.page())


def write_report(results: Result | Sequence[Result], path: str | Path) -> tuple[Path, ...]:
    """Write what was found: the answer first, then figure, table, notes and how it was measured.

    HTML is one file that needs no network. Markdown has its figures in files beside it,
    `<name>-<figure>.png`.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.write_report(study, "digits.html")
    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> kbatch.write_report([study, profile], "digits.md")

    Args:
        results: A `Study`, or what a function that measures returned, or a list of them, which
            makes one document.
        path: File to write, with suffix `.html` or `.md`.

    Returns:
        The files written, the report last.

    Raises:
        ValueError: If the suffix is another one, a study is empty or the list is.
        OSError: If the folder cannot be written, with what to do.
    """
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
    pages = [one.page() for one in given]
    from kbatch.page.document import html_text, markdown_files

    html = path.suffix.lower() == ".html"
    files = {path: html_text(pages).encode()} if html else markdown_files(pages, path)
    for file, data in files.items():
        write_whole_file(file, data)
    return tuple(files)


def shown_columns(table: "pd.DataFrame") -> list[ShownColumn]:
    """Return the columns that have a value, as texts."""
    known = table.astype(object).where(table.notna(), None)
    columns = {str(name): known[name].tolist() for name in known.columns}
    digits, shown = table.attrs.get("digits", {}), []
    for name, values in columns.items():
        base, _, end = name.rpartition(", ")
        if (end in ("low", "high") and base in columns) or all(v in (None, "") for v in values):
            continue
        numeric = all(v is None or _is_number(v) for v in values)
        lows, highs = (columns.get(f"{name}, {end}") for end in ("low", "high"))
        if not numeric:
            texts = ["" if v is None else _word(v) for v in values]
        else:
            write: Callable[[float], str]
            write = functools.partial(format_number, digits=digits.get(name, 3))
            if name in _CHOSEN:
                write = setting
            # A count that is missing in some rows is a floating-point number in the others.
            elif lows is None and all(v is None or float(v).is_integer() for v in values):
                write = "{:,.0f}".format
            texts = ["n/a" if v is None else write(v) for v in values]
            for row, (low, high) in enumerate(zip(lows or (), highs or (), strict=True)):
                if values[row] is not None and low is not None and high is not None:
                    texts[row] += f" ({write(low)} to {write(high)})"
        shown.append(ShownColumn(name, numeric, texts, values))
    return shown


def named_rows(table: "pd.DataFrame") -> list[bool]:
    """Return whether the answer names each row."""
    named = set(table.attrs.get("answer", ()))
    return [label in named for label in table.index]


def table_text(table: "pd.DataFrame") -> str:
    """Write a table for a terminal, with a star before the rows that the answer names.

    Long texts, such as code, stand in lines of their own below it; an outcome stays in its row.
    """
    columns, below = shown_columns(table), []
    lines = ["  ", *("* " if named else "  " for named in named_rows(table))]
    for column in columns:
        cells = [column.title, *column.texts]
        width = max(map(len, cells))
        if width > _LONGEST and column.title != "outcome":
            named = zip(columns[0].texts, column.texts, strict=True)
            below += [f"{name}: {text}" for name, text in named if text]
            continue
        side = str.rjust if column.numeric else str.ljust
        lines = [f"{line}{side(c, width)}  " for line, c in zip(lines, cells, strict=True)]
    return "\n".join(line.rstrip() for line in (*lines, *([""] if below else []), *below))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if _is_number(value) else " ".join(str(value).split())
