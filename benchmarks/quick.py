"""Adds `--quick` to a benchmark: in less than a minute, and less exact."""

import argparse
import sys
from typing import Any


def parse_arguments(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parses the command line. With `--quick` these values are the defaults."""
    parser.add_argument("--quick", action="store_true", help="less than a minute, less exact")
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    return parser.parse_args()
