"""`kbatch export`: a study as a table."""

import argparse
from typing import Any

from kbatch.cli.study_arguments import add_study_arguments

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


def add_export(commands: Any) -> None:
    """Adds the command."""
    export = commands.add_parser("export", help="write the trials as a table")
    add_study_arguments(export, "kbatch-trials.csv", "table to write, .csv or .json")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.whole_files import write_whole_file
    from kbatch.study.empty_study import refuse_empty
    from kbatch.study.loading import load_study

    suffix = options.output.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(
            f"`--output` must end in .csv or .json. Received: --output {options.output}."
        )
    study = load_study(options.study)
    refuse_empty(study)
    table = study.to_dataframe()
    if suffix == ".csv":
        text = table.map(_no_formula).rename(columns=_no_formula).to_csv(index=False)
    else:
        text = table.to_json(orient="records", indent=1)
    write_whole_file(options.output, str(text).encode())
    print(options.output)


def _no_formula(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    if not isinstance(cell, str):
        return cell
    # pandas does not quote a carriage return, which would begin a new row.
    text = cell.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
