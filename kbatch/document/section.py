"""What a report says before it is rendered: sections, environment facts and short lines."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from kbatch.document.numbers import gibibytes, listed, memory_text
from kbatch.document.tables import Table
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.usage import GpuProcess

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
        label: What it is about in a few words, for a caption.
        text: The note.
        columns: Names of the table's columns whose numbers it concerns, none where it concerns
            what is not there.
        keys: The rows whose numbers it concerns, none for all of them.
    """

    mark: str
    label: str
    text: str
    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class Figure(NamedTuple):
    """A figure that is yet to be drawn.

    Attributes:
        name: For the name of its file.
        title: What it shows.
        height_in: Height in inches.
        draw: Draws it in Axes, whose label describes it for those who do not see it.
        notes: Notes that concern its numbers.
        shape: How a page has it: "alone" in a row, "small" beside others, or "wide" where it
            cannot be read small.
    """

    name: str
    title: str
    height_in: float
    draw: "Callable[[Axes], Axes]"
    notes: tuple[Note, ...] = ()
    shape: Literal["alone", "small", "wide"] = "alone"


class Section(NamedTuple):
    """What one record says.

    Attributes:
        kind: What it is a record of, in a word or two.
        name: Its name.
        headline: The decision in a sentence.
        lead: What binds and how sure it is, a sentence or two each.
        details: What was compared or done, a sentence or two each.
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


_UNKNOWN = "n/a (the system does not tell)"


def environment_facts(environment: EnvironmentRecord | None) -> tuple[Fact, ...]:
    """List machine and software, nothing where they were not recorded."""
    if environment is None:
        return ()
    memory, load = environment.memory_bytes, environment.load_average
    return (
        Fact("Started", _readable_time(environment.created_at)),
        Fact("Device", environment.device),
        Fact("Processor", f"{environment.cpu}, {environment.cpu_count} usable"),
        Fact("Host memory", gibibytes(memory) if memory else _UNKNOWN),
        Fact("Load average at the start", _UNKNOWN if load is None else f"{load:.2f}"),
        Fact("Platform", environment.platform),
        *(Fact(name, version) for name, version in environment.versions.items()),
    )


def _readable_time(created_at: str) -> str:
    """Write the start to the minute, with its offset from UTC; what is no time stays as it is."""
    try:
        started = datetime.fromisoformat(created_at)
    except ValueError:
        return created_at
    return f"{started:%Y-%m-%d %H:%M} {started.tzname() or ''}".strip()


_NAMES = {"tensorflow": "TensorFlow", "keras": "Keras"}
# What a clock differs by where nothing lowers it.
_CLOCKS_ALIKE = 1.05
UNKNOWN_DEVICE = "n/a (device not recorded)"


def neighbours_text(processes: Sequence[GpuProcess]) -> str:
    """Say who else holds memory of a GPU; an empty text where nobody does."""
    if not processes:
        return ""
    who = "Another process holds" if len(processes) == 1 else "Other processes hold"
    named = [
        f"process {p.pid} "
        + ("an unknown part" if p.memory_bytes is None else memory_text(p.memory_bytes))
        for p in processes
    ]
    return f"{who} memory of the GPU: {listed(named)}."


def clocks_text(clocks: Iterable[tuple[str, float | None]]) -> str:
    """Say between which clocks a GPU ran what is compared, where that is more than 5 %."""
    known = sorted((mhz, name) for name, mhz in clocks if mhz is not None)
    if not known or known[-1][0] <= _CLOCKS_ALIKE * known[0][0]:
        return ""
    (slow, slow_name), (fast, fast_name) = known[0], known[-1]
    return f"GPU clock from {slow:,.0f} MHz at {slow_name} to {fast:,.0f} MHz at {fast_name}"


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """List the device and the versions of TensorFlow and Keras, such as `"Keras 3.15.1"`."""
    if environment is None:
        return [UNKNOWN_DEVICE]
    return [environment.device, *versions_text(environment)]


def versions_text(environment: EnvironmentRecord | None) -> list[str]:
    """List the versions alone, none where they were not recorded."""
    versions = environment.versions if environment else {}
    return [
        f"{name} {versions[package]}" for package, name in _NAMES.items() if package in versions
    ]


def one_line(text: str, most_characters: int = 300) -> str:
    """Brings a message on one line and shortens what is too long to read."""
    words = " ".join(text.split())
    return words if len(words) <= most_characters else f"{words[: most_characters - 1]}…"
