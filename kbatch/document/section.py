"""What a report says before it is rendered: sections, environment facts and short lines."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from kbatch.document.numbers import gibibytes, join_words, memory_text, shortened
from kbatch.document.tables import Table
from kbatch.records.record import EnvironmentRecord
from kbatch.records.usage import GpuProcess

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Fact(NamedTuple):
    name: str
    value: str


class Note(NamedTuple):
    """What a reader of the numbers must know."""

    mark: str  # The letter beside the numbers it concerns, empty where there are none.
    label: str  # What it is about in a few words, for a caption.
    text: str
    # The columns of the table whose numbers it concerns, by name: none where it concerns what is
    # not there; and the rows by key, none for all of them.
    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class Figure(NamedTuple):
    """A figure that is yet to be drawn."""

    name: str  # For the name of its file.
    title: str
    height_in: float
    # Draws it in Axes, whose label then describes it for those who do not see it.
    draw: "Callable[[Axes], Axes]"
    notes: tuple[Note, ...] = ()  # Those that concern its numbers.
    shape: Literal["alone", "small"] = "alone"  # Alone in a row of the page, or beside others.


class Section(NamedTuple):
    kind: str  # What it is a record of, in a word or two.
    name: str
    headline: str  # The decision in a sentence.
    lead: tuple[str, ...]  # What binds and how sure it is, a sentence or two each.
    details: tuple[str, ...]  # What was compared or done, a sentence or two each.
    conditions: str  # Device, versions and budget in a line, empty where the details say it.
    figures: tuple[Figure, ...]  # That of the decision first.
    tables: tuple[Table, ...]
    notes: tuple[Note, ...]  # Those with a mark first.
    command: str | None  # The command line that measured it, None if it was not recorded.
    settings: tuple[Fact, ...]  # What it was measured with.
    environment: tuple[Fact, ...]  # Machine and software; empty if not recorded.


_UNKNOWN = "n/a (the system does not tell)"


def environment_facts(environment: EnvironmentRecord | None) -> tuple[Fact, ...]:
    """List machine and software, nothing where they were not recorded."""
    if environment is None:
        return ()
    memory, load = environment.memory_bytes, environment.load_average
    started = environment.created_at
    with contextlib.suppress(ValueError):  # What is no time stays as it is.
        at = datetime.fromisoformat(started)
        started = f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}".strip()
    return (
        Fact("Started", started),
        Fact("Device", environment.device),
        Fact("Processor", f"{environment.cpu}, {environment.cpu_count} usable"),
        Fact("Host memory", gibibytes(memory) if memory else _UNKNOWN),
        Fact("Load average at the start", _UNKNOWN if load is None else f"{load:.2f}"),
        Fact("Platform", environment.platform),
        *(Fact(name, version) for name, version in environment.versions.items()),
    )


UNKNOWN_DEVICE = "n/a (device not recorded)"


def neighbours_text(processes: Sequence[GpuProcess]) -> str:
    """Say who else holds memory of a GPU; an empty text where nobody does."""
    if not processes:
        return ""
    who = "Another process holds" if len(processes) == 1 else "Other processes hold"
    named = join_words(
        f"process {p.pid} {(p.name and f'({p.name}) ') or ''}"
        + ("an unknown part" if p.memory_bytes is None else memory_text(p.memory_bytes))
        for p in processes
    )
    return f"{who} memory of the GPU: {named}."


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """List the device and the versions of TensorFlow and Keras, such as `"Keras 3.15.1"`."""
    if environment is None:
        return [UNKNOWN_DEVICE]
    return [environment.device, *versions_text(environment)]


def versions_text(environment: EnvironmentRecord | None) -> list[str]:
    """List the versions alone, none where they were not recorded."""
    versions = environment.versions if environment else {}
    names = {"tensorflow": "TensorFlow", "keras": "Keras"}
    return [f"{name} {versions[key]}" for key, name in names.items() if key in versions]


def one_line(text: str) -> str:
    """Bring a message onto one line and shorten it."""
    return shortened(" ".join(text.split()), 300)
