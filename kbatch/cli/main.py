"""The command line of kbatch."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from kbatch import __version__
from kbatch.cli.machine import add_distribute, add_doctor
from kbatch.cli.measure import add_inference, add_input, add_max_batch, add_recommend
from kbatch.cli.study import add_demo, add_export, add_plot, add_report, add_view

# In the order of the help.
_COMMANDS = (
    add_demo,
    add_doctor,
    add_max_batch,
    add_inference,
    add_input,
    add_recommend,
    add_distribute,
    add_report,
    add_view,
    add_plot,
    add_export,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file need not be text in the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options.run(options)
        sys.stdout.flush()
    except (OSError, ValueError, ImportError, MemoryError) as error:
        # A worker process notes where it failed: the message alone may not tell.
        print("\n".join([f"kbatch: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # Of output that cannot be written Python would complain at its end too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("kbatch: interrupted", file=sys.stderr)
        return 130
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kbatch", description="Which batch size should I use, and why?"
    )
    parser.add_argument("--version", action="version", version=f"kbatch {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser
