"""Render results as text for a terminal, as HTML, as Markdown, and as the output of a cell.

HTML is one file. Markdown has its figures in separate files.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote

from markupsafe import Markup, escape

from kbatch.page.numbers import environment_texts, format_number, setting

if TYPE_CHECKING:
    import jinja2
    import pandas as pd
    from matplotlib.axes import Axes

# Columns of numbers that a user chose. They are written without trailing zeros.
_CHOSEN = {"learning rate", "weight decay"}
# Width of a figure in a page. At this width, its texts are about as large as those in tables.
_COLUMN_IN = 4.2
# Longer texts are written below the table in a terminal.
_LONGEST = 60


class Figure(NamedTuple):
    """A figure that can be drawn."""

    name: str  # Used in the name of its file.
    title: str
    height_in: float
    # Draws the figure in Axes or in a new figure. The label of the Axes describes it.
    draw: "Callable[[Axes | None], Axes]"

    @classmethod
    def of(cls, plot: Any, result: Any, title: str, height_in: float, **options: Any) -> Self:
        """Make a figure from a public function `plot_...`, with the same name."""
        name = plot.__name__.removeprefix("plot_").replace("_", "-")
        draw = functools.partial(plot, result, **options)
        return cls("-".join((name, *options.values())), title, height_in, draw)


class ShownColumn(NamedTuple):
    """A column of a table, formatted for reading."""

    title: str
    numeric: bool  # Whether it holds numbers, which are aligned right.
    texts: list[str]
    values: list[Any]  # Values to sort by. None if a cell is empty.


def shown_columns(table: "pd.DataFrame") -> list[ShownColumn]:
    """Format the columns that have a value."""
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
            # pandas turns a column of counts with missing values into floating-point numbers.
            elif lows is None and all(v is None or float(v).is_integer() for v in values):
                write = "{:,.0f}".format
            texts = ["n/a" if v is None else write(v) for v in values]
            for row, (low, high) in enumerate(zip(lows or (), highs or (), strict=True)):
                if values[row] is not None and low is not None and high is not None:
                    texts[row] += f" ({write(low)} to {write(high)})"
        shown.append(ShownColumn(name, numeric, texts, values))
    return shown


def named_rows(table: "pd.DataFrame") -> list[bool]:
    """Return for each row whether the answer names it."""
    answer = set(table.attrs.get("answer", ()))
    return [label in answer for label in table.index]


def table_text(table: "pd.DataFrame") -> str:
    """Write a table for a terminal, with a star before the rows that the answer names.

    A title has two lines if its column is narrower. Columns of long texts, such as code, are
    written below the table, one line for each row.
    """
    columns, named, below = shown_columns(table), named_rows(table), []
    mark = "  " if any(named) else ""
    lines = [mark, mark, *("* " if row else mark for row in named)]
    for column in columns:
        width = max(map(len, column.texts))
        if width > _LONGEST and column.title not in ("outcome", "verdict"):
            rows = zip(columns[0].texts, column.texts, strict=True)
            below += [f"{name}: {text}" for name, text in rows if text]
            continue
        cells = [*_two_lines(column.title, width), *column.texts]
        width, side = max(map(len, cells)), str.rjust if column.numeric else str.ljust
        lines = [f"{line}{side(c, width)}  " for line, c in zip(lines, cells, strict=True)]
    lines = [*lines[not lines[0].strip() :], *([""] if below else []), *below]
    return "\n".join(line.rstrip() for line in lines)


def _two_lines(title: str, width: int) -> tuple[str, str]:
    """Break a title that is wider than its column, or leave the first line empty."""
    words = re.split(r" (?![^(]*\))", title)  # Not inside brackets.
    pairs = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(len(words))]
    # Two lines are better only if they save more than two characters.
    return min(pairs, key=lambda pair: max(width, *map(len, pair)) + 2 * bool(pair[0]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if _is_number(value) else " ".join(str(value).split())


def document_files(results: Sequence[Any], path: Path, refusal: str = "") -> dict[Path, bytes]:
    """Return the contents of a report by file: an HTML page, or Markdown after its figures.

    `refusal` says why studies among the results are not compared.
    """
    from kbatch.plotting import canvas

    html, files, pictures = path.suffix.lower() == ".html", {}, {}
    figures = [result.figures() for result in results]
    placed = [(place, figure) for place, group in enumerate(figures, 1) for figure in group]
    for place, figure in placed:
        width_in = _COLUMN_IN if html else canvas.WIDTH_IN
        axes = figure.draw(canvas.detached_axes(figure.height_in, width_in=width_in))
        if html:
            address = canvas.svg_address(axes)
        else:
            name = f"{path.stem}-{f'{place}-' if len(results) > 1 else ''}{figure.name}.png"
            files[path.with_name(name)] = canvas.figure_bytes(axes, ".png")
            address = quote(name)
        pictures[place, figure.name] = {
            "address": address,
            "alt_text": str(axes.get_label()).partition("\n")[0],
            "caption": canvas.caption_lines(axes)[0],  # The page lists the facts elsewhere.
        }
    template = templates().get_template(f"report{path.suffix.lower()}")
    text = template.render(results=results, refusal=refusal, figures=figures, pictures=pictures)
    return {**files, path: text.encode()}


def notebook_html(
    sentences: Sequence[str],
    table: "pd.DataFrame",
    *,
    use: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write a result as HTML for a cell. `use` is a sentence and the lines of code below it."""
    # Notebooks remove style sheets. Without colours, it suits light and dark pages.
    said = {"sentences": sentences, "use": use, "notes": notes}
    return templates().get_template("notebook.html").render(said, table=table, most=40)


_RANGE = re.compile(r"\(?-?[\d.,]+ (?:±|to) -?[\d.,]+\)?")
_NUMBER_WITH_UNIT = re.compile(r"(?<=\d) (?=%|[KMGT]iB|ms\b|s\b|samples/s)")
# Characters with a meaning in Markdown or in HTML inside it.
_MARKUP = re.compile(r"([\\`*\[\]<>|])")


def templates() -> "jinja2.Environment":
    """Return the environment of the templates. An unknown name in a template is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.page"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    texts = (prose, in_cell, plain, plain_prose, fenced)
    for function in (*texts, shown_columns, named_rows, environment_texts):
        environment.filters[function.__name__] = function
    return environment


def in_cell(text: str) -> Markup:
    """Write a cell as HTML: long names break at underscores, and ranges do not break."""
    breakable = str(escape(text)).replace("_", "_<wbr>")
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', breakable))


def prose(text: str) -> Markup:
    """Write a sentence as HTML: back-ticks mark code, and numbers stay with their units."""
    text = _NUMBER_WITH_UNIT.sub("\N{NO-BREAK SPACE}", text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def plain_prose(text: str) -> str:
    """Write a sentence as Markdown: everything is escaped except code between back-ticks."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(part if i % 2 else _MARKUP.sub(r"\\\1", part) for i, part in enumerate(parts))


def plain(text: str) -> str:
    """Write a text as Markdown with everything escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def fenced(command: str) -> str:
    """Write a command as a code block of Markdown, with fences longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{fence}sh\n{command}\n{fence}"
