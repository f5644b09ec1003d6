"""Where numbers were measured, for the line that stands beside them."""

from collections.abc import Iterable, Sequence

from kbatch.document.number_text import listed, memory_text
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.usage import GpuProcess

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
    """Say between which clocks a GPU ran what is compared, where that is more than 5 %.

    Args:
        clocks: Names of what is compared, with its clock in MHz.
    """
    known = sorted((mhz, name) for name, mhz in clocks if mhz is not None)
    if not known or known[-1][0] <= _CLOCKS_ALIKE * known[0][0]:
        return ""
    (slow, slow_name), (fast, fast_name) = known[0], known[-1]
    return f"GPU clock from {slow:,.0f} MHz at {slow_name} to {fast:,.0f} MHz at {fast_name}"


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """Lists the device and the versions of TensorFlow and Keras, such as `"Keras 3.15.1"`."""
    if environment is None:
        return [UNKNOWN_DEVICE]
    return [environment.device, *versions_text(environment)]


def versions_text(environment: EnvironmentRecord | None) -> list[str]:
    """Lists the versions alone, none where they were not recorded."""
    versions = environment.versions if environment else {}
    return [
        f"{name} {versions[package]}" for package, name in _NAMES.items() if package in versions
    ]
