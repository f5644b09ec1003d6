"""The examination of a machine that is to train: packages, GPUs, memory, dtype policies."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from kbatch.page.numbers import memory_text

if TYPE_CHECKING:
    from kbatch.device.gpus import NvmlGpu


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str  # Such as "keras-tuner" or "memory".
    status: Literal["ok", "warning", "missing"]  # Results or speed may suffer; it is needed.
    text: str
    command: str | None = None  # That mends it, where one does.


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_findings(
    requirements: Iterable[str], version_of: Callable[[str], str | None] = installed_version
) -> tuple[Finding, ...]:
    """List the versions in one finding, and what is missing or of another version in its own."""
    versions, findings = [f"python {platform.python_version()}"], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, allowed, version = requirement.name, requirement.specifier, None
        command = f"pip install --upgrade '{name}{allowed}'"
        if (version := version_of(name)) is None:
            findings.append(Finding(name, "missing", "not installed", command))
        elif not allowed.contains(version, prereleases=True):
            text = f"{version} is installed, kbatch needs {allowed}"
            findings.append(Finding(name, "warning", text, command))
        else:
            versions.append(f"{name} {version}")
    return (Finding("packages", "ok", ", ".join(versions)), *findings)


def backend_findings() -> tuple[Finding, ...]:
    """Start Keras; nothing is found where it runs on TensorFlow."""
    try:
        import keras

        if (backend := keras.config.backend()) == "tensorflow":
            return ()
        text = f"Keras runs on {backend}, kbatch trains on TensorFlow"
    except ImportError as error:  # As of jax, where `keras.json` asks for it.
        text = f"Keras does not start on TensorFlow: {error}"
    return (Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow"),)


def gpu_findings(
    tensorflow_devices: Callable[[], Sequence[str]], variables: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Compare the driver's GPUs, read before TensorFlow starts them, with those it sees."""
    from kbatch.device.gpus import NvmlUnavailableError, opened_nvml, read_gpu

    problem, driver = "NVML lists none that answers.", ()
    try:
        with opened_nvml() as gpus:
            driver = tuple(_driver_finding(gpu, read_gpu(gpu).memory_used_bytes) for gpu in gpus)
    except NvmlUnavailableError as error:
        problem = str(error)
    seen = [device for device in tensorflow_devices() if device.startswith("GPU")]
    if seen:
        return (*driver, Finding("TensorFlow", "ok", f"sees {', '.join(seen)}"))
    if not driver:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            return (Finding("GPU", "missing", f"does not answer. {problem}", "nvidia-smi"),)
        return (Finding("GPU", "ok", f"none, training runs on the CPU. {problem}"),)
    if (named := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        text = f"sees none of these GPUs under CUDA_VISIBLE_DEVICES={named}"
        return (*driver, Finding("TensorFlow", "warning", text, "unset CUDA_VISIBLE_DEVICES"))
    text = (
        "sees none of these GPUs: install NVIDIA's libraries with it. Where they are installed, "
        "`tf.config.list_physical_devices()` logs the reason under TF_CPP_MIN_LOG_LEVEL=0"
    )
    mend = "pip install 'tensorflow[and-cuda]'"
    return (*driver, Finding("TensorFlow", "missing", text, mend))


# A share of a GPU's memory that nobody misses: a driver's context takes some hundred megabytes.
_SMALL_SHARE = 0.05


def _driver_finding(gpu: "NvmlGpu", used_bytes: int | None) -> Finding:
    topic, name, total_bytes = f"GPU {gpu.index}", gpu.name or "unnamed", gpu.memory_total_bytes
    if total_bytes is None or used_bytes is None:
        return Finding(topic, "ok", f"{name}, free memory n/a (the driver does not show it)")
    text = f"{name}, {memory_text(total_bytes - used_bytes)} of {memory_text(total_bytes)} free"
    if gpu.mig:  # What lies in other instances is in nobody's way.
        return Finding(topic, "ok", f"{text} on all its instances (MIG)")
    if used_bytes <= _SMALL_SHARE * total_bytes:
        return Finding(topic, "ok", text)
    return Finding(topic, "warning", f"{text}: other processes hold the rest", "nvidia-smi")


# A worker process with TensorFlow takes about half a GiB before it trains anything.
_LEAST_FREE_BYTES = 2**30


def memory_finding(total_bytes: int, available_bytes: int) -> Finding:
    text = f"{memory_text(available_bytes)} of {memory_text(total_bytes)} free"
    if available_bytes >= _LEAST_FREE_BYTES:
        return Finding("memory", "ok", text)
    return Finding("memory", "warning", f"{text}: a process with TensorFlow needs 1 GiB")


# Ratios nearer to 1 than this are not worth a change of policy.
_SAME_SPEED = 0.1


def policy_finding(times_as_fast: Mapping[str, float], device: str) -> Finding:
    """Say what to set, from how many times as fast as float32 each policy trains."""
    others = {name: ratio for name, ratio in times_as_fast.items() if name != "float32"}
    measured = " and ".join(f"{name} {ratio:.2f} times" for name, ratio in others.items())
    best = max(others, key=others.__getitem__)
    if others[best] > 1 + _SAME_SPEED:
        advice = f'set dtype_policy="{best}"'
    elif others[best] < 1 - _SAME_SPEED:
        advice = 'set dtype_policy="float32", or a mixed policy to save memory'
    else:
        advice = f'dtype_policy="{best}" saves memory, not time'
    slow = others["mixed_float16"] < 1 - _SAME_SPEED  # It is the default.
    text = f"{measured} as fast as float32 on this {device}: {advice}"
    return Finding("dtype policy", "warning" if slow else "ok", text)
