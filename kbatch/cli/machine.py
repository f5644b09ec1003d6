"""The command about the machine, `doctor`."""

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbatch.device.doctor import Examination


def add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="examine versions, devices, memory and speed")
    doctor.add_argument("--json", action="store_true", help="print the record as JSON")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> None:
    from kbatch.device.quiet_start import quiet_start
    from kbatch.records.json_codec import record_text

    if not options.json:
        print("Starting TensorFlow and timing train steps ...", flush=True)
    variables = dict(os.environ)
    # Else the few seconds take all memory of a GPU on which others train.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with quiet_start():
        examination = _examine(variables)
    print(record_text(examination) if options.json else examination_text(examination))
    if not examination.complete:
        sys.exit(1)


def _examine(variables: Mapping[str, str]) -> "Examination":
    """Examine versions, devices, memory and the speed of policies as far as packages are there."""
    from kbatch.device.doctor import Examination, Finding, read_package_findings

    packages = read_package_findings()
    if any(finding.status == "missing" for finding in packages):
        return Examination(packages, (), None)
    from kbatch.device.doctor import (
        nvidia_findings,
        read_host_findings,
        read_nvidia,
        read_tensorflow_build,
    )

    nvidia = read_nvidia()  # Before TensorFlow starts.
    import tensorflow as tf

    from kbatch.device.environment import read_environment
    from kbatch.device.failures import failure_text
    from kbatch.training.dtype_policy import measure_policy_speeds, policy_finding

    environment = read_environment()
    host = read_host_findings(environment.cpu_count, variables=variables)
    device = "CPU" if environment.devices == ("CPU",) else "GPU"
    try:
        speeds = measure_policy_speeds()
        policy = policy_finding(speeds, device)
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        speeds, policy = (), Finding("dtype policy", "missing", text)
    build = read_tensorflow_build()
    devices = nvidia_findings(nvidia, environment.devices, build=build, variables=variables)
    return Examination((*packages, *devices, *host, policy), speeds, environment)


def examination_text(examination: "Examination") -> str:
    lines = []
    for finding in examination.findings:
        head = f"{finding.status:<9}{finding.topic:<14} "
        indent, width = " " * len(head), 76 + len(head)
        lines += textwrap.wrap(finding.text, width, initial_indent=head, subsequent_indent=indent)
        lines += [f"{indent}$ {finding.command}"] if finding.command else []
    missing = [finding.topic for finding in examination.findings if finding.status == "missing"]
    if missing:
        lines.append(f"\nmissing: {', '.join(missing)}")
        if examination.environment is None:
            lines.append("Devices, memory and speed are examined once that is fixed.")
    else:
        lines.append("\nnothing that is needed is missing")
    return "\n".join(lines)
