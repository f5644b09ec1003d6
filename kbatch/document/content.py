"""What a report says, before anything is rendered."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from kbatch.document.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Fact(NamedTuple):
    """A name with its value.

    Attributes:
        name: What it is.
        value: Its value as text.
    """

    name: str
    value: str


class Note(NamedTuple):
    """What a reader of the numbers must know.

    Attributes:
        mark: The letter that stands beside the numbers it concerns, empty where there are none.
        label: The same in a few words, for a caption.
        text: The note.
    """

    mark: str
    label: str
    text: str


class Figure(NamedTuple):
    """A figure that is yet to be drawn.

    Attributes:
        name: For the name of its file.
        title: What it shows.
        height_in: Height in inches.
        draw: Draws it in Axes.
        alt_text: Its description, for those who do not see it; empty where the label of its Axes
            is one.
        notes: Notes that concern its numbers.
        shape: How a page has it: "alone" in a row, "small" beside others, or "wide" where it
            cannot be read small.
    """

    name: str
    title: str
    height_in: float
    draw: "Callable[[Axes], Axes]"
    alt_text: str = ""
    notes: tuple[Note, ...] = ()
    shape: Literal["alone", "small", "wide"] = "alone"


class Section(NamedTuple):
    """What one record says.

    Attributes:
        kind: What it is a record of, in a word or two.
        name: Its name.
        headline: The decision in a sentence.
        lead: What binds and how sure it is, a sentence or two each.
        details: What was compared or done, likewise.
        conditions: Device, versions and budget in a line, empty where the details tell it.
        figures: The figures, that of the decision first.
        tables: The tables.
        notes: What a reader of the numbers must know, those with a mark first.
        command: The command line that measured it, None if it was not recorded.
        settings: What it was measured with.
        environment: Machine and software; empty if not recorded.
    """

    kind: str
    name: str
    headline: str
    lead: tuple[str, ...]
    details: tuple[str, ...]
    conditions: str
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    notes: tuple[Note, ...]
    command: str | None
    settings: tuple[Fact, ...]
    environment: tuple[Fact, ...]
