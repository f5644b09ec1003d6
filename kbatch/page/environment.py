"""Machine and software in words."""

import contextlib
from datetime import datetime

from kbatch.page.numbers import memory_text
from kbatch.records.machine import EnvironmentRecord

_UNKNOWN = "n/a (the system does not tell)"


def environment_texts(environment: EnvironmentRecord | None) -> dict[str, str]:
    """Return machine and software by name, nothing where they were not recorded."""
    if environment is None:
        return {}
    memory, load = environment.memory_bytes, environment.load_average
    started = environment.created_at
    with contextlib.suppress(ValueError):  # What is no time stays as it is.
        at = datetime.fromisoformat(started)
        started = f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}".strip()
    return {
        "Started": started,
        "Device": environment.device,
        "Processor": f"{environment.cpu}, {environment.cpu_count} usable",
        "Host memory": memory_text(memory) if memory else _UNKNOWN,
        "Load average at the start": _UNKNOWN if load is None else f"{load:.2f}",
        "Platform": environment.platform,
        **environment.versions,
    }


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """List the device and the versions of TensorFlow and Keras, such as `"Keras 3.15.1"`."""
    if environment is None:
        return ["n/a (device not recorded)"]
    names, versions = {"tensorflow": "TensorFlow", "keras": "Keras"}, environment.versions
    known = (f"{name} {versions[key]}" for key, name in names.items() if key in versions)
    return [environment.device, *known]
