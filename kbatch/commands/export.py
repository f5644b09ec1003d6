"""`kbatch export`: a study as a table."""

import argparse
from typing import Any

from kbatch.commands.study_arguments import add_study_arguments


def add_export(commands: Any) -> None:
    """Adds the command."""
    export = commands.add_parser("export", help="write the trials as a table")
    add_study_arguments(export, "kbatch-trials.csv", "table to write, .csv or .json")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study

    table = load_study(options.study).to_dataframe()
    if options.output.suffix == ".csv":
        table.to_csv(options.output, index=False)
    elif options.output.suffix == ".json":
        table.to_json(options.output, orient="records", indent=1)
    else:
        raise ValueError(
            f"`--output` must end in .csv or .json. Received: --output {options.output}."
        )
    print(options.output)
