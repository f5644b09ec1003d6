"""A result's table as people read it: numbers with few digits, and intervals in brackets.

The table is a DataFrame whose column names carry units, such as "step time (ms)". The columns
"X, low" and "X, high" are the interval of X and are shown behind its value. A column without any
value is not shown. `table.attrs["answer"]` lists the labels of the rows that the answer names, and
`table.attrs["digits"]` the significant digits of a column where three are too few.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kbatch.page.numbers import format_number, setting

if TYPE_CHECKING:
    import pandas as pd

# Numbers that somebody chose, which are written without trailing zeros.
_CHOSEN = {"learning rate", "weight decay"}


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
        many = digits.get(name, 3)
        texts = _texts(name, values, numeric, many)
        ends = [columns.get(f"{name}, {end}") for end in ("low", "high")]
        if ends[0] and ends[1]:
            for row, (low, high) in enumerate(zip(*ends, strict=True)):
                if values[row] is not None and low is not None and high is not None:
                    low, high = _texts(name, (low, high), True, many)
                    texts[row] += f" ({low} to {high})"
        shown.append(ShownColumn(name, numeric, texts, values))
    return shown


def answer_rows(table: "pd.DataFrame") -> list[bool]:
    """Return for each row whether the answer names it."""
    named = set(table.attrs.get("answer", ()))
    return [label in named for label in table.index]


def table_text(table: "pd.DataFrame") -> str:
    """Write a table for a terminal, with a star before the rows that the answer names."""
    columns, rows = shown_columns(table), answer_rows(table)
    lines = ["  "] + ["* " if named else "  " for named in rows]
    for column in columns:
        cells = [column.title, *column.texts]
        width = max(map(len, cells))
        side = str.rjust if column.numeric else str.ljust
        lines = [f"{line}{side(c, width)}  " for line, c in zip(lines, cells, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def _known(value: Any) -> Any:
    """Return a value, None for one that is missing."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _empty(values: Sequence[Any]) -> bool:
    return all(value is None or value == "" for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _texts(name: str, values: Iterable[Any], numeric: bool, digits: int) -> list[str]:
    values = list(values)
    if not numeric:
        return ["" if v is None else _word(v) for v in values]
    # Counts are written whole; one that is missing in some rows makes them floating-point numbers.
    whole = all(v is None or float(v).is_integer() for v in values)
    chosen = name in _CHOSEN

    def text(value: Any) -> str:
        if value is None:
            return "n/a"
        if chosen:
            return setting(value)
        return f"{int(value):,}" if whole else format_number(value, digits)

    return [text(value) for value in values]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if _is_number(value) else " ".join(str(value).split())
