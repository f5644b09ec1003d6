"""Where numbers were measured."""

import dataclasses
from collections.abc import Mapping

# No clock tells less apart.
SHORTEST_S = 1e-9


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
