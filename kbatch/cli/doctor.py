"""`kbatch doctor`: what is here, what is missing and the command that mends it."""

import argparse
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbatch.device.examination import Examination, Finding

_TOPIC_WIDTH = 14
_TEXT_WIDTH = 76


def add_doctor(commands: Any) -> None:
    """Adds the command."""
    doctor = commands.add_parser("doctor", help="examine versions, devices, memory and speed")
    doctor.add_argument("--json", action="store_true", help="print the record as JSON")
    doctor.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    """Prints the examination.

    Raises:
        SystemExit: With status 1 if something that is needed is missing.
    """
    from kbatch.cli.examination import examine
    from kbatch.device.quiet_start import quiet_start
    from kbatch.records.json_files import record_text

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
    """Writes what was found, a line or two a topic, then how much of it is missing."""
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
