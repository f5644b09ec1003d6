"""A result's table as people read it: numbers with few digits, and intervals in brackets.

The table is a DataFrame whose column names carry units, such as "step time (ms)". The columns
"X, low" and "X, high" are the interval of X and are shown behind its value. A column without any
value is not shown. `table.attrs["answer"]` lists the labels of the rows that the answer names, and
`table.attrs["digits"]` the significant digits of a column where three are too few.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kbatch.page.numbers import format_number, setting

if TYPE_CHECKING:
    import pandas as pd

# Numbers that somebody chose, which are written without trailing zeros.
_CHOSEN = {"learning rate", "weight decay"}
# A column of longer texts is none for a terminal.
_LONGEST = 60


class ShownColumn(NamedTuple):
    title: str
    numeric: bool  # Whether it holds numbers, which stand to the right.
    texts: list[str]
    values: list[Any]  # To sort by; None where there is none.


def shown_columns(table: "pd.DataFrame") -> list[ShownColumn]:
    """Return the columns that have a value, as texts."""
    columns = {str(name): [_known(v) for v in table[name].tolist()] for name in table.columns}
    digits, shown = table.attrs.get("digits", {}), []
    for name, values in columns.items():
        base, mark, end = name.rpartition(", ")
        if (mark and end in ("low", "high") and base in columns) or _empty(values):
            continue
        numeric = all(v is None or _is_number(v) for v in values)
        lows, highs = (columns.get(f"{name}, {end}") for end in ("low", "high"))
        if not numeric:
            texts = ["" if v is None else _word(v) for v in values]
        else:
            write = _writer(name, values, digits.get(name, 3), counted=lows is None)
            texts = ["n/a" if v is None else write(v) for v in values]
            for row, (low, high) in enumerate(zip(lows or (), highs or (), strict=True)):
                if values[row] is not None and low is not None and high is not None:
                    texts[row] += f" ({write(low)} to {write(high)})"
        shown.append(ShownColumn(name, numeric, texts, values))
    return shown


def answer_rows(table: "pd.DataFrame") -> list[bool]:
    """Return for each row whether the answer names it."""
    named = set(table.attrs.get("answer", ()))
    return [label in named for label in table.index]


def table_text(table: "pd.DataFrame") -> str:
    """Write a table for a terminal, with a star before the rows that the answer names.

    Long texts, such as code, stand in lines of their own below it; an outcome stays in its row.
    """
    columns, rows = shown_columns(table), answer_rows(table)
    lines, below = ["  "] + ["* " if named else "  " for named in rows], []
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


def _known(value: Any) -> Any:
    """Return a value, None for one that is missing."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _empty(values: Sequence[Any]) -> bool:
    return all(value is None or value == "" for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _writer(
    name: str, values: Sequence[Any], digits: int, *, counted: bool
) -> Callable[[float], str]:
    """Return how the numbers of a column are written."""
    if name in _CHOSEN:
        return setting
    # A count that is missing in some rows is a floating-point number in the others.
    if counted and all(v is None or float(v).is_integer() for v in values):
        return lambda value: f"{int(value):,}"
    return lambda value: format_number(value, digits)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if _is_number(value) else " ".join(str(value).split())
