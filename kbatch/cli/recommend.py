"""`kbatch recommend`: which batch size, micro-batch size and learning rate to use, and why."""

import argparse
from pathlib import Path
from typing import Any

from kbatch.cli.memory_size import memory_size
from kbatch.cli.model_arguments import BUILD, DATA, add_model_arguments, check_model_arguments
from kbatch.cli.named_function import named_build, named_x_y
from kbatch.recommendation.defaults import BASE_BATCH_SIZE, BUDGET_S


def add_recommend(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("recommend", help="recommend a batch size, and say why")
    add_model_arguments(
        parser, data="function that returns (x, y) or a dataset, or takes a batch size and does so"
    )
    parser.add_argument(
        "--base-batch-size",
        type=int,
        default=BASE_BATCH_SIZE,
        metavar="N",
        help="batch size that the model's learning rate suits (%(default)s)",
    )
    parser.add_argument(
        "--rule",
        choices=("auto", "linear", "sqrt", "none"),
        default="auto",
        help="how the learning rate follows (linear for SGD, sqrt else)",
    )
    parser.add_argument(
        "--limit", metavar="SIZE", help="memory that may be taken, such as 2GiB (as in max-batch)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="seconds to spend on measuring (%(default)s)",
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="most epochs of the pilot")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all training")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the record")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="write the figure of the limits"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from kbatch.device.quiet_start import quiet_start

    check_model_arguments(options)
    limit_bytes = None if options.limit is None else memory_size(options.limit)
    if options.figure is not None and options.figure.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--figure` must end in .png, .svg or .pdf. Received: --figure {options.figure}."
        )
    console = Console()
    console.print("Starting TensorFlow ...", highlight=False)
    with quiet_start():
        from kbatch.recommendation.recommend import recommend
    from kbatch.plotting.saving import save_figure
    from kbatch.recommendation.limits_figure import plot_limits

    build = named_build(options.build, BUILD)
    x, y = named_x_y(options.data, DATA)
    found = recommend(
        build,
        x,
        y,
        base_batch_size=options.base_batch_size,
        learning_rate_scaling=None if options.rule == "none" else options.rule,
        memory_limit_bytes=limit_bytes,
        budget_s=options.budget,
        epochs=options.epochs,
        seed=options.seed,
        on_progress=lambda line: console.print(f"measuring {line} ...", highlight=False),
    )
    console.print()
    print(found)
    if options.output is not None:
        found.save(options.output)
        console.print(f"record: {options.output}", highlight=False, soft_wrap=True)
    if options.figure is not None:
        save_figure(plot_limits(found), options.figure)
        console.print(f"figure: {options.figure}", highlight=False, soft_wrap=True)
