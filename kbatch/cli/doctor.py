"""The command `doctor`: packages, GPUs, memory and dtype policies of a machine that is to train."""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kbatch.cli.arguments import starting_tensorflow


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
        findings = list(_examined(variables))
    for finding in findings:
        look = {"subsequent_indent": _INDENT, "break_on_hyphens": False}
        head = f"{finding.status:<9}{finding.topic:<14} "
        print(textwrap.fill(finding.text, 100, initial_indent=head, **look))
        if finding.command is not None:
            print(f"{_INDENT}$ {finding.command}")
    missing = [finding.topic for finding in findings if finding.status == "missing"]
    print(f"\nmissing: {', '.join(missing)}" if missing else "\nnothing that is needed is missing")
    if missing:
        sys.exit(1)


_INDENT = 24 * " "


def _examined(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Examine packages, devices, memory and the speed of policies, up to what is missing."""
    try:
        packages = package_findings(importlib.metadata.requires("kbatch-tuner") or ())
    except importlib.metadata.PackageNotFoundError:
        text = "kbatch is on the path but not installed: what it requires is unknown"
        packages = [Finding("packages", "warning", text, "pip install .")]
    yield from packages
    if any(finding.status == "missing" for finding in packages):
        return
    try:
        import keras

        backend = keras.config.backend()
        wrong = None if backend == "tensorflow" else f"Keras runs on {backend}"
    except ImportError as error:  # As of jax, where `keras.json` asks for it.
        wrong = f"Keras does not start: {error}"
    if wrong is not None:
        text = f"{wrong}; kbatch trains on TensorFlow"
        yield Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow")
        return

    import psutil
    import tensorflow as tf

    from kbatch.device.environment import available_bytes, read_environment
    from kbatch.device.failures import failure_text

    yield from gpu_findings(lambda: read_environment().devices, variables)
    yield memory_finding(psutil.virtual_memory().total, available_bytes())
    device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    try:
        yield policy_finding(_policy_speeds(), device)
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        yield Finding("dtype policy", "missing", text)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_findings(
    requirements: Iterable[str], version_of: Callable[[str], str | None] = installed_version
) -> list[Finding]:
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
    return [Finding("packages", "ok", ", ".join(versions)), *findings]


# A share of a GPU's memory that nobody misses: a driver's context takes some hundred megabytes.
_SMALL_SHARE = 0.05


def gpu_findings(
    tensorflow_devices: Callable[[], Sequence[str]], variables: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the driver's GPUs, read before TensorFlow starts them, with those it sees."""
    from kbatch.device.gpus import opened_nvml, read_gpu
    from kbatch.page.numbers import memory_text

    with opened_nvml() as (gpus, unavailable):
        for gpu in gpus:
            total_bytes, used_bytes = gpu.memory_total_bytes, read_gpu(gpu).memory_used_bytes
            free, held = "free memory n/a (the driver does not show it)", False
            if total_bytes is not None and used_bytes is not None:
                whole = memory_text(total_bytes)
                free = f"{memory_text(total_bytes - used_bytes)} of {whole} free"
                # What lies in other instances is in nobody's way.
                held = used_bytes > _SMALL_SHARE * total_bytes and not gpu.mig
            more = ": other processes hold the rest" if held else ""
            text = f"{gpu.name or 'unnamed'}, {free}{' on all its instances (MIG)' * gpu.mig}{more}"
            status, command = ("warning", "nvidia-smi") if held else ("ok", None)
            yield Finding(f"GPU {gpu.index}", status, text, command)
    problem = unavailable or "NVML lists none that answers."
    seen = [device for device in tensorflow_devices() if device.startswith("GPU")]
    named = variables.get("CUDA_VISIBLE_DEVICES")
    if seen:
        yield Finding("TensorFlow", "ok", f"sees {', '.join(seen)}")
    elif not gpus and any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "missing", f"does not answer. {problem}", "nvidia-smi")
    elif not gpus:
        yield Finding("GPU", "ok", f"none, training runs on the CPU. {problem}")
    elif named is not None:
        text = f"sees none of these GPUs under CUDA_VISIBLE_DEVICES={named}"
        yield Finding("TensorFlow", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    else:
        text = (
            "sees none of these GPUs: install NVIDIA's libraries with it. Where they are "
            "installed, `tf.config.list_physical_devices()` logs the reason under "
            "TF_CPP_MIN_LOG_LEVEL=0"
        )
        yield Finding("TensorFlow", "missing", text, "pip install 'tensorflow[and-cuda]'")


# A worker process with TensorFlow takes about half a GiB before it trains anything.
_LEAST_FREE_BYTES = 2**30


def memory_finding(total_bytes: int, available_bytes: int) -> Finding:
    from kbatch.page.numbers import memory_text

    text = f"{memory_text(available_bytes)} of {memory_text(total_bytes)} free"
    if available_bytes >= _LEAST_FREE_BYTES:
        return Finding("memory", "ok", text)
    return Finding("memory", "warning", f"{text}: a process with TensorFlow needs 1 GiB")


# Ratios nearer to each other than this are not worth a change of policy.
_SAME_SPEED = 0.1


def policy_finding(times_as_fast: Mapping[str, float], device: str) -> Finding:
    """Say what to set, from how many times as fast as float32 each policy trains."""
    others = [f"{n} {r:.2f} times" for n, r in times_as_fast.items() if n != "float32"]
    # What a search takes by itself: a processor half as fast by it is too slow.
    slow = device == "CPU" and times_as_fast["mixed_float16"] < 0.5
    taken = "float32" if slow else "mixed_float16"
    best = max(times_as_fast, key=times_as_fast.__getitem__)
    worse = times_as_fast[best] > (1 + _SAME_SPEED) * times_as_fast[taken]
    advice = f"a search takes {taken} by itself"
    if worse:
        advice = f'give BatchSizeHyperModel dtype_policy="{best}", where {advice}'
    text = f"{' and '.join(others)} as fast as float32 on this {device}: {advice}"
    return Finding("dtype policy", "warning" if worse else "ok", text)


def _policy_speeds() -> dict[str, float]:
    """Time an update under each policy: how many times as fast it is as in float32.

    The net is dense, nearly all matrix products. A device that cannot compute in bfloat16 has no
    ratio of it.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from kbatch.search.first_updates import Updates
    from kbatch.training.data.training_data import TrainingData
    from kbatch.training.dtype_policy import dtype_policy_scope

    width = 4096 if tf.config.list_physical_devices("GPU") else 512
    rng = np.random.default_rng(0)
    data = TrainingData(rng.normal(size=(width, width)), rng.integers(0, 10, width))
    step_s: dict[str, float] = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        with dtype_policy_scope(policy):
            layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
            output = keras.layers.Dense(10, dtype="float32")
            model = keras.Sequential([keras.Input((width,)), *layers, output])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
        try:
            step_s[policy] = Updates(model, data).step_s(width)
        except tf.errors.OpError:
            if policy != "mixed_bfloat16":
                raise
    return {policy: step_s["float32"] / own_s for policy, own_s in step_s.items()}
