"""Arguments of the commands that read a study."""

import argparse
from pathlib import Path


def add_study_arguments(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Adds the project directory and the `--output` of a command that reads a study."""
    parser.add_argument("study", type=Path, metavar="DIR", help="project directory of a search")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), help=f"{text} (%(default)s)"
    )
