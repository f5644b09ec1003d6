"""What records share: checks, and the environment."""

import dataclasses
from collections.abc import Mapping, Sequence

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
