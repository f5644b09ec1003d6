"""What a page says of a result, before it is rendered."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class Figure(NamedTuple):
    """A figure that is yet to be drawn."""

    name: str  # For the name of its file.
    title: str
    height_in: float
    # Draws it in Axes, or in a new figure; its label describes it for those who do not see it.
    draw: "Callable[[Axes | None], Axes]"
    shape: Literal["alone", "small"] = "alone"  # Alone in a row of the page, or beside others.


class Page(NamedTuple):
    """One result, as all its renderings show it."""

    title: str  # What it is a result of, in a few words.
    answer: str  # The decision, in one sentence.
    table: "pd.DataFrame"  # As `kbatch.page.table` reads it.
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]  # The one that shows the decision first.
    settings: Mapping[str, str]  # What it was measured with.
    environment: Mapping[str, str]  # Machine and software; empty if not recorded.
    command: str | None  # The command line that measured it, None if it was not recorded.
