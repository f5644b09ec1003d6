"""The commands about the machine: `doctor` and `distribute`."""

import argparse
import os
import socket
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbatch.device.doctor import Examination, Finding


_TOPIC_WIDTH = 14
_TEXT_WIDTH = 76


def add_doctor(commands: Any) -> None:
    """Add the command."""
    doctor = commands.add_parser("doctor", help="examine versions, devices, memory and speed")
    doctor.add_argument("--json", action="store_true", help="print the record as JSON")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> None:
    """Print the examination."""
    from kbatch.cli.examination import examine
    from kbatch.device.quiet_start import quiet_start
    from kbatch.records.json_codec import record_text

    if not options.json:
        print("Starting TensorFlow and timing train steps ...", flush=True)
    variables = dict(os.environ)
    # Else the few seconds take all memory of a GPU on which others train.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with quiet_start():
        examination = examine(variables)
    print(record_text(examination) if options.json else examination_text(examination))
    if not examination.complete:
        sys.exit(1)


def examination_text(examination: "Examination") -> str:
    """Write what was found, a line or two a topic, then how much of it is missing."""
    lines = [_finding_text(finding) for finding in examination.findings]
    missing = [finding.topic for finding in examination.findings if finding.status == "missing"]
    if missing:
        lines.append(f"\nmissing: {', '.join(missing)}")
        if examination.environment is None:
            lines.append("Devices, memory and speed are examined once that is mended.")
    else:
        lines.append("\nnothing that is needed is missing")
    return "\n".join(lines)


def _finding_text(finding: "Finding") -> str:
    head = f"{finding.status:<9}{finding.topic:<{_TOPIC_WIDTH}} "
    indent = " " * len(head)
    text = textwrap.fill(
        finding.text, _TEXT_WIDTH + len(head), initial_indent=head, subsequent_indent=indent
    )
    return text if finding.command is None else f"{text}\n{indent}$ {finding.command}"


def add_distribute(commands: Any) -> None:
    """Add the command."""
    distribute = commands.add_parser(
        "distribute", help="run a script's search with a chief and several workers"
    )
    distribute.add_argument("--workers", type=int, required=True, help="workers on this host")
    distribute.add_argument(
        "--restarts", type=int, default=3, help="how often a worker that dies is started again (3)"
    )
    distribute.add_argument(
        "--chief-address",
        metavar="HOST:PORT",
        help="address at which other hosts reach the chief; nothing is encrypted or "
        "authenticated, so everybody who reaches it can change the search (default: a port of "
        "this host alone, open to all its users)",
    )
    distribute.add_argument(
        "--join", action="store_true", help="workers only, of the chief at --chief-address"
    )
    distribute.add_argument("script", type=Path, help="a script that calls `tuner.search` once")
    distribute.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    distribute.set_defaults(run=_run_distribute)


def _run_distribute(options: argparse.Namespace) -> None:
    from kbatch.search.distribute import DistributionPlan, run_distributed
    from kbatch.search.distributed_script import parse_address

    _check(options)
    address = options.chief_address
    plan = DistributionPlan(
        words=(str(options.script), *options.arguments),
        workers=options.workers,
        restarts=options.restarts,
        chief_address=parse_address(address) if address else None,
        chief_here=not options.join,
        # keras-tuner takes every name with "chief" in it for the chief's.
        name=f"{socket.gethostname().replace('chief', 'host')}-tuner" if address else "tuner",
    )
    run_distributed(plan, lambda line: print(line, flush=True))


def _check(options: argparse.Namespace) -> None:
    if options.workers < 1 or options.restarts < 0:
        raise ValueError(
            "`--workers` must be at least 1 and `--restarts` at least 0. "
            f"Received: --workers {options.workers} --restarts {options.restarts}."
        )
    if not options.script.is_file():
        raise ValueError(f"There is no such script. Received: script={str(options.script)!r}.")
    if options.join and not options.chief_address:
        raise ValueError(
            "`--join` needs the address of a chief: add `--chief-address HOST:PORT`. "
            "Received: --join."
        )
