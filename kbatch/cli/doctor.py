"""The command `doctor`: packages, GPUs, memory and dtype policies of a machine that is to train."""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kbatch.cli.arguments import starting_tensorflow

if TYPE_CHECKING:
    from kbatch.device.gpus import NvmlGpu


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str  # Such as "keras-tuner" or "memory".
    status: Literal["ok", "warning", "missing"]  # Results or speed may suffer; it is needed.
    text: str
    command: str | None = None  # That mends it, where one does.


def add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="examine versions, devices, memory and speed")
    doctor.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> None:
    variables = dict(os.environ)
    # Else the few seconds take all memory of a GPU on which others train.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with starting_tensorflow():
        findings = examine(variables)
    print(examination_text(findings))
    if any(finding.status == "missing" for finding in findings):
        sys.exit(1)


def examine(variables: Mapping[str, str]) -> tuple[Finding, ...]:
    """Examine packages, devices, memory and the speed of policies, as far as packages allow."""
    try:
        packages = package_findings(importlib.metadata.requires("kbatch-tuner") or ())
    except importlib.metadata.PackageNotFoundError:
        text = "kbatch is on the path but not installed: what it requires is unknown"
        packages = (Finding("packages", "warning", text, "pip install ."),)
    later = Finding("devices", "warning", "not examined before that is mended")
    if any(finding.status == "missing" for finding in packages):
        return (*packages, later)
    if backend := backend_findings():
        return (*packages, *backend, later)

    import psutil
    import tensorflow as tf

    from kbatch.device.environment import available_bytes, read_environment
    from kbatch.device.failures import failure_text

    gpus = gpu_findings(lambda: read_environment().devices, variables)
    memory = memory_finding(psutil.virtual_memory().total, available_bytes())
    device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    try:
        policy = policy_finding(_policy_speeds(), device)
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        policy = Finding("dtype policy", "missing", text)
    return (*packages, *gpus, memory, policy)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_findings(
    requirements: Iterable[str], version_of: Callable[[str], str | None] = installed_version
) -> tuple[Finding, ...]:
    """List the versions in one finding, and what is missing or of another version in its own."""
    from packaging.requirements import Requirement

    versions, findings = [f"python {platform.python_version()}"], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, allowed = requirement.name, requirement.specifier
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
    from kbatch.device.gpus import opened_nvml, read_gpu

    with opened_nvml() as (gpus, unavailable):
        driver = tuple(_driver_finding(gpu, read_gpu(gpu).memory_used_bytes) for gpu in gpus)
    problem = unavailable or "NVML lists none that answers."
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
    from kbatch.page.numbers import memory_text

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
    from kbatch.page.numbers import memory_text

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
        advice = f'give BatchSizeHyperModel dtype_policy="{best}"'
    elif others[best] < 1 - _SAME_SPEED:
        advice = 'give BatchSizeHyperModel dtype_policy="float32", or a mixed one to save memory'
    else:
        advice = f'dtype_policy="{best}" saves memory, not time'
    slow = others["mixed_float16"] < 1 - _SAME_SPEED  # It is the default.
    text = f"{measured} as fast as float32 on this {device}: {advice}"
    return Finding("dtype policy", "warning" if slow else "ok", text)


# Seconds that the steps of a policy are timed for. One step is always timed, however long it takes:
# many CPUs multiply float16 without their vector units.
_TIMED_S = 0.5


def _policy_speeds() -> dict[str, float]:
    """Time a train step under each policy: how many times as fast it is as in float32.

    The step is that of a dense net, nearly all matrix products, at its fastest. A device that
    cannot compute in bfloat16 has no ratio of it.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from kbatch.training.dtype_policy import dtype_policy_scope

    width = 4096 if tf.config.list_physical_devices("GPU") else 512
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(width, width)), tf.float32)
    y = tf.constant(rng.integers(0, 10, width))
    fastest_s: dict[str, float] = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        with dtype_policy_scope(policy):
            layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
            output = keras.layers.Dense(10, dtype="float32")
            model = keras.Sequential([keras.Input((width,)), *layers, output])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
        try:
            model.train_on_batch(x, y)  # Compilation is no part of a step.
        except tf.errors.OpError:
            if policy != "mixed_bfloat16":
                raise
            continue
        times_s: list[float] = []
        while sum(times_s) < _TIMED_S:
            started_s = time.perf_counter()
            model.train_on_batch(x, y)
            times_s.append(time.perf_counter() - started_s)
        fastest_s[policy] = min(times_s)
    return {policy: fastest_s["float32"] / own_s for policy, own_s in fastest_s.items()}


def examination_text(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        head = f"{finding.status:<9}{finding.topic:<14} "
        indent = " " * len(head)
        text = textwrap.wrap(finding.text, 76, break_on_hyphens=False)
        lines += [head + text[0], *(indent + line for line in text[1:])]
        lines += [f"{indent}$ {finding.command}"] if finding.command else []
    missing = [finding.topic for finding in findings if finding.status == "missing"]
    last = f"missing: {', '.join(missing)}" if missing else "nothing that is needed is missing"
    return "\n".join([*lines, "", last])
