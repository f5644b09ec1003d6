"""The command about the machine, `doctor`."""

import argparse
import importlib.metadata
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kbatch.cli.arguments import starting_tensorflow

if TYPE_CHECKING:
    from kbatch.device.doctor import Finding


def add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="examine versions, devices, memory and speed")
    doctor.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> None:
    variables = dict(os.environ)
    # Else the few seconds take all memory of a GPU on which others train.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with starting_tensorflow():
        findings = _examine(variables)
    print(examination_text(findings))
    if any(finding.status == "missing" for finding in findings):
        sys.exit(1)


def _examine(variables: Mapping[str, str]) -> "tuple[Finding, ...]":
    """Examine packages, devices, memory and the speed of policies as far as packages are there."""
    from kbatch.device import doctor

    try:
        packages = doctor.package_findings(importlib.metadata.requires("kbatch-tuner") or ())
    except importlib.metadata.PackageNotFoundError:
        text = "kbatch is on the path but not installed: what it requires is unknown"
        packages = (doctor.Finding("packages", "warning", text, "pip install ."),)
    later = doctor.Finding("devices", "warning", "not examined before that is mended")
    if any(finding.status == "missing" for finding in packages):
        return (*packages, later)
    if backend := doctor.backend_findings():
        return (*packages, *backend, later)

    import psutil
    import tensorflow as tf

    from kbatch.device.environment import available_bytes, read_environment
    from kbatch.device.failures import failure_text

    gpus = doctor.gpu_findings(lambda: read_environment().devices, variables)
    memory = doctor.memory_finding(psutil.virtual_memory().total, available_bytes())
    device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    try:
        policy = doctor.policy_finding(_policy_speeds(), device)
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        policy = doctor.Finding("dtype policy", "missing", text)
    return (*packages, *gpus, memory, policy)


# Seconds that the steps of a policy are timed for, and at least one: many a CPU multiplies halves
# without its vector units.
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


def examination_text(findings: "Sequence[Finding]") -> str:
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
