"""The record of the machine and the software behind a study."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EnvironmentRecord:
    """Where the numbers were measured.

    Attributes:
        versions: Version of each package that matters, by name, and of Python; where TensorFlow has
            a GPU, of its driver (`"nvidia-driver"`), and of the CUDA and cuDNN that TensorFlow was
            built with.
        platform: Operating system and processor architecture.
        cpu: Name of the processor.
        cpu_count: Processors that this process may use.
        memory_bytes: Memory of the host, in bytes.
        devices: TensorFlow's devices, such as `"GPU:0 NVIDIA H100"`; `"CPU"` without a GPU.
        load_average: Mean number of running processes over the minute before the start, None
            where the system does not tell.
        command: The command line.
        created_at: Start of the study, ISO 8601 in UTC.
    """

    versions: Mapping[str, str]
    platform: str
    cpu: str
    cpu_count: int
    memory_bytes: int | None
    devices: tuple[str, ...]
    load_average: float | None
    command: str
    created_at: str

    @property
    def device(self) -> str:
        """The devices in a few words, for a figure."""
        if self.devices != ("CPU",):
            return ", ".join(self.devices)
        return f"CPU, {self.cpu_count} cores"
