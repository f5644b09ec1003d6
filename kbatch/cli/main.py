"""The command line of kbatch."""

import io
import os
import sys
from collections.abc import Sequence

from kbatch import __version__
from kbatch.cli import demo, doctor, measure, study
from kbatch.cli.arguments import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file need not be text in the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = command_parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except (OSError, ValueError, ImportError, MemoryError) as error:
        # A worker process notes where it failed: the message alone may not say it.
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


def command_parser() -> Parser:
    parser = Parser(prog="kbatch", description="Which batch size should I use, and why?")
    parser.add_argument("--version", action="version", version=f"kbatch {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    # In the order of the help.
    demo.add_demo(commands)
    doctor.add_doctor(commands)
    measure.add_max_batch(commands)
    measure.add_inference(commands)
    measure.add_input(commands)
    measure.add_recommend(commands)
    study.add_report(commands)
    study.add_plot(commands)
    study.add_export(commands)
    return parser
