"""The command `doctor`: check packages, GPUs, memory and dtype policies of this machine."""

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kbatch.cli.arguments import starting_tensorflow


class Finding(NamedTuple):
    """The result of one check."""

    topic: str  # Such as "keras-tuner" or "memory".
    # "warning": results or speed may suffer. "missing": kbatch cannot train.
    status: Literal["ok", "warning", "missing"]
    text: str
    command: str | None = None  # A command that fixes it.


def add_doctor(commands: Any) -> None:
    text = "check versions, devices, memory and speed"
    commands.add_parser("doctor", help=text).set_defaults(run=_doctor)


_INDENT = 24 * " "


def _doctor(_: argparse.Namespace) -> None:
    variables = dict(os.environ)
    # Otherwise TensorFlow takes all free memory of a GPU that others use.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with starting_tensorflow():
        findings = list(_findings(variables))
    for topic, status, text, command in findings:
        look = {"subsequent_indent": _INDENT, "break_on_hyphens": False}
        print(textwrap.fill(text, 100, initial_indent=f"{status:<9}{topic:<14} ", **look))
        if command is not None:
            print(f"{_INDENT}$ {command}")
    missing = ", ".join(finding.topic for finding in findings if finding.status == "missing")
    print(f"\nmissing: {missing}" if missing else "\nkbatch can train on this machine")
    if missing:
        sys.exit(1)


def _findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check packages, devices, memory and the speed of policies, until something is missing."""
    try:
        packages = package_findings(importlib.metadata.requires("kbatch-tuner") or ())
    except importlib.metadata.PackageNotFoundError:
        text = "kbatch is not installed (only on the path), so its requirements are unknown"
        packages = [Finding("packages", "warning", text, "pip install .")]
    yield from packages
    if any(finding.status == "missing" for finding in packages):
        return
    try:
        import keras

        backend = f"runs on {keras.config.backend()}"
    except ImportError as error:  # If `keras.json` names jax, and jax is not installed.
        backend = f"does not start: {error}"
    if backend != "runs on tensorflow":
        text = f"Keras {backend}; kbatch needs the TensorFlow backend"
        yield Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow")
        return

    import psutil
    import tensorflow as tf

    from kbatch.device.failures import failure_text
    from kbatch.device.machine import available_bytes, read_environment

    yield from gpu_findings(lambda: read_environment().devices, variables)
    yield memory_finding(psutil.virtual_memory().total, available_bytes())
    device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    try:
        yield policy_finding(_policy_speeds(4096 if device == "GPU" else 512), device)
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        yield Finding("dtype policy", "missing", text)


def package_findings(requirements: Iterable[str]) -> list[Finding]:
    """List all versions in one finding, and each missing or wrong version in another one."""
    from packaging.requirements import Requirement

    versions, findings = [f"python {platform.python_version()}"], []
    for package in map(Requirement, requirements):
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        command = f"pip install --upgrade '{package.name}{package.specifier}'"
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package.name, "missing", "not installed", command))
            continue
        if package.specifier.contains(version, prereleases=True):
            versions.append(f"{package.name} {version}")
        else:
            text = f"{version} is installed, but kbatch needs {package.specifier}"
            findings.append(Finding(package.name, "warning", text, command))
    return [Finding("packages", "ok", ", ".join(versions)), *findings]


def gpu_findings(
    tensorflow_devices: Callable[[], Sequence[str]], variables: Mapping[str, str]
) -> Iterator[Finding]:
    """Report the GPUs that the driver lists, and whether TensorFlow sees them."""
    from kbatch.device.machine import opened_nvml, read_gpu
    from kbatch.page.numbers import memory_text

    # The driver is read first, because TensorFlow takes memory when it starts the GPUs.
    with opened_nvml() as (gpus, unavailable):
        for gpu in gpus:
            total_bytes, used_bytes = gpu.memory_total_bytes, read_gpu(gpu)[0].memory_used_bytes
            free, in_use = "free memory n/a (the driver does not report it)", False
            if total_bytes is not None and used_bytes is not None:
                free = f"{memory_text(total_bytes - used_bytes)} of {memory_text(total_bytes)} free"
                # The driver alone takes some hundred megabytes. With MIG, other instances do not
                # matter.
                in_use = used_bytes > 0.05 * total_bytes and not gpu.mig
            instances = " (MIG: all instances together)" if gpu.mig else ""
            topic, text = f"GPU {gpu.index}", f"{gpu.name or 'unnamed'}{instances}, {free}"
            if in_use:
                text += ": other processes use its memory"
                yield Finding(topic, "warning", text, "nvidia-smi")
            else:
                yield Finding(topic, "ok", text)
    problem = unavailable or "The NVIDIA driver finds no working GPU."
    visible = [device for device in tensorflow_devices() if device.startswith("GPU")]
    if visible:
        yield Finding("TensorFlow", "ok", f"sees {', '.join(visible)}")
    elif not gpus and any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "missing", f"does not answer. {problem}", "nvidia-smi")
    elif not gpus:
        yield Finding("GPU", "ok", f"none, so training runs on the CPU. {problem}")
    elif (names := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        text = f"sees none of these GPUs, because CUDA_VISIBLE_DEVICES={names}"
        yield Finding("TensorFlow", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    else:
        text = "sees none of these GPUs: install NVIDIA's libraries. If they are installed, run "
        text += "`tf.config.list_physical_devices()` with TF_CPP_MIN_LOG_LEVEL=0 to see why"
        yield Finding("TensorFlow", "missing", text, "pip install 'tensorflow[and-cuda]'")


def memory_finding(total_bytes: int, available_bytes: int) -> Finding:
    from kbatch.page.numbers import memory_text

    text = f"{memory_text(available_bytes)} of {memory_text(total_bytes)} free"
    if available_bytes < 2**30:  # TensorFlow alone takes half of it.
        return Finding("memory", "warning", f"{text}: a process with TensorFlow needs 1 GiB")
    return Finding("memory", "ok", text)


def policy_finding(times_as_fast: Mapping[str, float], device: str) -> Finding:
    """Recommend a policy, from the speed of each policy relative to float32."""
    from kbatch.page.numbers import speed_text
    from kbatch.search.first_updates import TOO_SLOW

    texts = {name: speed_text(ratio, "float32") for name, ratio in times_as_fast.items()}
    others = [f"{name} is {text}" for name, text in texts.items() if name != "float32"]
    slow = device == "CPU" and TOO_SLOW * times_as_fast["mixed_float16"] < 1
    default = "float32" if slow else "mixed_float16"
    text = f"on this {device} {' and '.join(others)}: a search uses {default}"
    best = max(times_as_fast, key=times_as_fast.__getitem__)
    if times_as_fast[best] <= 1.1 * times_as_fast[default]:  # Not worth a change.
        return Finding("dtype policy", "ok", text)
    advice = f'pass dtype_policy="{best}" to BatchSizeHyperModel'
    return Finding("dtype policy", "warning", f"{text}; {advice}")


def _policy_speeds(width: int) -> dict[str, float]:
    """Measure the speed of an update under each policy, relative to float32.

    bfloat16 is left out if the device does not support it.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from kbatch.search.first_updates import Updates
    from kbatch.training.data.training_data import TrainingData
    from kbatch.training.dtype_policy import dtype_policy_scope

    rng = np.random.default_rng(0)
    data = TrainingData(rng.normal(size=(width, width)), rng.normal(size=(width, 10)))
    step_s: dict[str, float] = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        with dtype_policy_scope(policy):
            layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
            model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
            model.compile("sgd", "mse")
        try:
            step_s[policy] = Updates(model, data).step_s(width)
        except tf.errors.OpError:
            if policy != "mixed_bfloat16":
                raise
    return {policy: step_s["float32"] / seconds for policy, seconds in step_s.items()}
