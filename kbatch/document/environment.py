"""Machine and software as facts of a report."""

from datetime import datetime

from kbatch.document.content import Fact
from kbatch.document.number_text import gibibytes
from kbatch.records.environment import EnvironmentRecord

_UNKNOWN = "n/a (the system does not tell)"


def environment_facts(environment: EnvironmentRecord | None) -> tuple[Fact, ...]:
    """Lists machine and software, nothing where they were not recorded."""
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
    """Writes the start to the minute, with its offset from UTC; what is no time stays as it is."""
    try:
        started = datetime.fromisoformat(created_at)
    except ValueError:
        return created_at
    return f"{started:%Y-%m-%d %H:%M} {started.tzname() or ''}".strip()
