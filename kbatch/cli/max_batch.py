"""`kbatch max-batch`: the largest batch that fits in memory."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.cli.memory_size import memory_size
from kbatch.cli.model_arguments import BUILD, DATA, add_model_arguments, check_model_arguments
from kbatch.cli.named_function import named_build, named_x_y

if TYPE_CHECKING:
    from rich.console import Console

    from kbatch.memory.max_batch_record import MaxBatchSizeResult


def add_max_batch(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("max-batch", help="find the largest batch that fits in memory")
    add_model_arguments(
        parser, data="function that returns (x, y) or a dataset, or takes a batch size and does so"
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="memory that may be taken, such as 2GiB (what the GPU has; half of a host's)",
    )
    parser.add_argument(
        "--window",
        type=float,
        nargs=2,
        default=(0.80, 0.90),
        metavar=("LOW", "HIGH"),
        help="share of the limit to fill (0.8 0.9)",
    )
    parser.add_argument("--max", type=int, metavar="N", help="largest batch to try")
    parser.add_argument(
        "--inference", action="store_true", help="run predictions instead of train steps"
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="Keras dtype policy to build under, such as mixed_float16"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the result as JSON"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from kbatch.device.quiet_start import quiet_start

    check_model_arguments(options)
    limit_bytes = None if options.limit is None else memory_size(options.limit)
    console = Console()
    console.print("Starting TensorFlow ...", highlight=False)
    with quiet_start():
        from kbatch.memory.max_batch import find_max_batch_size
        from kbatch.training.dtype_policy import check_dtype_policies, dtype_policy_scope
    build = named_build(options.build, BUILD)
    x, y = named_x_y(options.data, DATA)
    policy = options.policy and check_dtype_policies(options.policy)[0]
    with dtype_policy_scope(policy) if policy else contextlib.nullcontext():
        result = find_max_batch_size(
            build,
            x,
            y,
            memory_window=tuple(options.window),
            memory_limit_bytes=limit_bytes,
            max_batch_size=options.max,
            training=not options.inference,
        )
    _print(result, console)
    if options.output is not None:
        result.save(options.output)
        console.print(f"result: {options.output}", highlight=False, soft_wrap=True)


def _print(result: "MaxBatchSizeResult", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from kbatch.memory.max_batch_text import max_batch_lines, probe_rows

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("batch size", "peak memory", "of the limit", "outcome", "seconds", "run"):
        table.add_column(title, justify="left" if title in ("outcome", "run") else "right")
    for row in probe_rows(result):
        table.add_row(*row)
    console.print(table)
    for line in max_batch_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
