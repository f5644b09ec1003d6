"""What all records share: saving, loading, a notebook's view, checks, and the environment."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from kbatch.records.json_codec import read_record, write_record

# The one door from a record upwards: looked up when a notebook asks, so that a record is read
# without what draws and writes; `tests/test_layout.py` knows it by name.
_WRITER = "kbatch.report.pages"


class ShownRecord:
    """A record that Jupyter, Colab and others show as HTML; `kbatch.report` writes the page."""

    def _repr_html_(self) -> str | None:
        return importlib.import_module(_WRITER).notebook_html(self)


class SavedRecord(ShownRecord):
    """What a frozen record needs to be saved and loaded as versioned JSON."""

    def save(self, path: Path | str) -> None:
        """Write the record as JSON."""
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record that `save` wrote."""
        return read_record(cls, Path(path))


# No clock tells less apart.
SHORTEST_S = 1e-9


def check_ranges(least: float, /, **numbers: float | Sequence[float] | None) -> None:
    """Check that numbers of a record are large enough; unknown ones (None, NaN) are."""
    for name, found in numbers.items():
        if found is None or (isinstance(found, (int, float)) and not found < least):
            continue
        for number in (found,) if isinstance(found, (int, float)) else found:
            if number is not None and number < least:
                raise ValueError(f"`{name}` must be at least {least}. Received: {name}={number}.")


def check_choice(choices: Sequence[str], /, **fields: str) -> None:
    for name, found in fields.items():
        if found not in choices:
            raise ValueError(
                f"`{name}` must be one of {', '.join(choices)}. Received: {name}={found!r}."
            )


@dataclasses.dataclass(frozen=True)
class EnvironmentRecord:
    """Where the numbers were measured."""

    # By name, of each package that matters and of Python; where TensorFlow has a GPU, of its driver
    # ("nvidia-driver"), and of the CUDA and cuDNN that TensorFlow was built with.
    versions: Mapping[str, str]
    platform: str  # Operating system and processor architecture.
    cpu: str
    cpu_count: int  # Processors that this process may use.
    memory_bytes: int | None  # Of the host.
    devices: tuple[str, ...]  # TensorFlow's, such as "GPU:0 NVIDIA H100"; "CPU" without a GPU.
    # Mean number of running processes over the minute before, None where the system does not tell.
    load_average: float | None
    command: str
    created_at: str  # Start of the study, ISO 8601 in UTC.

    @property
    def device(self) -> str:
        """The devices in a few words, for a figure."""
        if self.devices != ("CPU",):
            return ", ".join(self.devices)
        return f"CPU, {self.cpu_count} cores"
