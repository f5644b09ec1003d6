"""`kbatch report`: the report of a study."""

import argparse
from typing import Any

from kbatch.commands.study_arguments import add_study_arguments


def add_report(commands: Any) -> None:
    """Adds the command."""
    report = commands.add_parser("report", help="write a report of a study")
    add_study_arguments(report, "kbatch-report.html", "report to write, .html or .md")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study
    from kbatch.reporting.report import write_report

    write_report(load_study(options.study), options.output)
    print(options.output)
