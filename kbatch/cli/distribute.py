"""`kbatch distribute`: one search by several workers."""

import argparse
import socket
from pathlib import Path
from typing import Any


def add_distribute(commands: Any) -> None:
    """Adds the command."""
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
    distribute.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from kbatch.search.chief_address import parse_address
    from kbatch.search.distribution import DistributionPlan, run_distributed

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
