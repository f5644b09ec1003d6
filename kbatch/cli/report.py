"""`kbatch report`: the report of a study, or of profiles."""

import argparse
from pathlib import Path
from typing import Any


def add_report(commands: Any) -> None:
    """Adds the command."""
    report = commands.add_parser("report", help="write a report of a study or of profiles")
    report.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="DIR|FILE",
        help="project directory of a search, or the JSON file of a study, profile or result; "
        "several make one document",
    )
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kbatch-report.html"),
        help="report to write, .html or .md (%(default)s)",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from kbatch.report.load import load_record
    from kbatch.report.report import write_report

    records = [load_record(path) for path in options.records]
    for path in write_report(records, options.output):
        print(path)
