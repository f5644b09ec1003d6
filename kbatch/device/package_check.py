"""Whether the packages that kbatch needs are there, without importing any of them."""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kbatch.device.examination import Finding

# Why a package is needed, where its absence shows in a way that nobody would expect.
_WHY = {"tensorboard": ": keras-tuner imports it in every trial, and every trial fails"}


def package_findings(
    requirements: Sequence[str], installed: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Compares what is installed with what is required.

    Args:
        requirements: Such as `"keras>=3.15"`, as `importlib.metadata.requires` gives them; those
            of an extra are left out.
        installed: Version of each package that is installed, by name.

    Returns:
        A finding a package.
    """
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
    """Compares Python's version with what is required, such as `">=3.11"`."""
    bound = _lower_bound(required)
    if bound is not None and _release(version) < _release(bound):
        text = f"{version} is older than {bound}, which kbatch needs"
        return Finding("python", "missing", text, f"python{bound} -m venv .venv")
    return Finding("python", "ok", version)


def backend_finding(backend: str, source: str) -> Finding:
    """Judges Keras's backend.

    Args:
        backend: Its name.
        source: Where it is set.
    """
    if backend == "tensorflow":
        return Finding("backend", "ok", f"Keras runs on tensorflow ({source})")
    text = f"Keras would run on {backend} ({source}): kbatch trains on tensorflow"
    return Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow")


def read_package_findings() -> tuple[Finding, ...]:
    """Examines Python, the packages and Keras's backend of this process."""
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
    """Reads which backend Keras will take, as Keras itself does.

    Args:
        variables: Environment variables; `KERAS_BACKEND` goes first.
        home: Folder of Keras's settings unless `KERAS_HOME` says otherwise: the home directory,
            or `/tmp` where that cannot be written.

    Returns:
        The backend's name and where it is set.
    """
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
    """Gives the numbers at the start of a version, without zeros at the end."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(word) for word in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
