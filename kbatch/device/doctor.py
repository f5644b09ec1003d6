"""The record of a machine that is to train, and whether the packages are there."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kbatch.records.environment import EnvironmentRecord

STATUSES = ("ok", "warning", "missing")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: What it is, such as `"keras-tuner"` or `"memory"`.
        status: `"ok"`, `"warning"` where results or speed may suffer, `"missing"` where something
            that is needed is not there.
        text: What was found, in one line.
        command: The command that mends it, None where there is nothing to mend or no command
            does.
    """

    topic: str
    status: str
    text: str
    command: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(
                f"`status` must be one of {', '.join(STATUSES)}. Received: status={self.status!r}."
            )


@dataclasses.dataclass(frozen=True)
class PolicySpeed:
    """How long a train step takes under a dtype policy.

    Attributes:
        dtype_policy: Name of the policy.
        step_times_s: Seconds a step, one value a round; of a policy that is very slow one in all.
    """

    dtype_policy: str
    step_times_s: tuple[float, ...]

    def times_as_fast_as(self, other: "PolicySpeed") -> float:
        """Return the median over common rounds of the other policy's step time over this one's."""
        pairs = zip(other.step_times_s, self.step_times_s, strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclasses.dataclass(frozen=True)
class Examination:
    """What `kbatch doctor` found.

    Attributes:
        findings: Everything that was looked at.
        policy_speeds: Train steps that were timed, none where they could not be.
        environment: The machine and the software, None where TensorFlow could not be started.
    """

    findings: tuple[Finding, ...]
    policy_speeds: tuple[PolicySpeed, ...]
    environment: EnvironmentRecord | None

    @property
    def complete(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(finding.status != "missing" for finding in self.findings)


# Why a package is needed, where its absence shows in a way that nobody would expect.
_WHY = {"tensorboard": ": keras-tuner imports it in every trial, and every trial fails"}


def package_findings(
    requirements: Sequence[str], installed: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Compare what is installed with what is required."""
    wanted = [line for line in requirements if "extra ==" not in line]
    return tuple(_package_finding(line, installed) for line in wanted)


def _package_finding(requirement: str, installed: Mapping[str, str]) -> Finding:
    requirement = requirement.partition(";")[0].strip()
    name, bound = _name(requirement), _lower_bound(requirement)
    mend = f"pip install --upgrade '{requirement}'"
    version = installed.get(name)
    if version is None:
        return Finding(name, "missing", f"not installed{_WHY.get(name, '')}", mend)
    if bound is not None and _release(version) < _release(bound):
        text = f"{version} is older than {bound}, the oldest that kbatch was tested with"
        return Finding(name, "warning", text, mend)
    return Finding(name, "ok", version)


def python_finding(version: str, required: str) -> Finding:
    """Compare Python's version with what is required, such as `">=3.11"`."""
    bound = _lower_bound(required)
    if bound is not None and _release(version) < _release(bound):
        text = f"{version} is older than {bound}, which kbatch needs"
        return Finding("python", "missing", text, f"python{bound} -m venv .venv")
    return Finding("python", "ok", version)


def backend_finding(backend: str, source: str) -> Finding:
    """Judge Keras's backend."""
    if backend == "tensorflow":
        return Finding("backend", "ok", f"Keras runs on tensorflow ({source})")
    text = f"Keras would run on {backend} ({source}): kbatch trains on tensorflow"
    return Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow")


def read_package_findings() -> tuple[Finding, ...]:
    """Examine Python, the packages and Keras's backend of this process."""
    try:
        requirements = importlib.metadata.requires("kbatch") or []
        required = importlib.metadata.metadata("kbatch")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        text = "not installed, only on the path: what it requires is unknown"
        return (Finding("kbatch", "warning", text, "pip install ."), _read_backend_finding())
    return (
        python_finding(platform.python_version(), required),
        *package_findings(requirements, _versions(map(_name, requirements))),
        _read_backend_finding(),
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _read_backend_finding() -> Finding:
    home = Path.home()
    return backend_finding(
        *read_backend(os.environ, home if os.access(home, os.W_OK) else Path("/tmp"))
    )


def read_backend(variables: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Read which backend Keras will take, as Keras itself does."""
    if variables.get("KERAS_BACKEND"):
        return variables["KERAS_BACKEND"], "KERAS_BACKEND"
    settings = Path(variables.get("KERAS_HOME") or home / ".keras") / "keras.json"
    try:
        backend = json.loads(settings.read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):  # Keras ignores such a file as well.
        return "tensorflow", "Keras's default"
    return str(backend), str(settings)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _lower_bound(requirement: str) -> str | None:
    found = re.search(r">=\s*([0-9][0-9.]*)", requirement)
    return found.group(1) if found else None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, without zeros at the end."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(word) for word in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
