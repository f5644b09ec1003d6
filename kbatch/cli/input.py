"""`kbatch input`: whether the data is the bottleneck."""

import argparse
from pathlib import Path
from typing import Any

from kbatch.cli.model_arguments import BUILD, DATA, add_model_arguments, check_model_arguments
from kbatch.cli.named_function import named_build, named_data

_RECORD, _FIGURE = "input.json", "input.png"


def add_input(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("input", help="tell whether the data is the bottleneck")
    add_model_arguments(parser, data="dataset, PyDataset or arrays, or a function that makes them")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="examples in a batch (those of the dataset)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds to spend on measuring"
    )
    parser.add_argument(
        "--no-remedies", action="store_true", help="leave out the changes to the pipeline"
    )
    parser.add_argument(
        "--cache-bytes", type=int, metavar="BYTES", help="memory that a cache may take when tried"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kbatch-input"),
        metavar="DIR",
        help="where record and figure go (%(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from kbatch.device.quiet_start import quiet_start

    check_model_arguments(options)
    with quiet_start():
        from kbatch.input_pipeline.measure import profile_input_pipeline
    from kbatch.input_pipeline.input_pipeline_figure import plot_input_pipeline
    from kbatch.input_pipeline.text import input_lines
    from kbatch.plotting.saving import save_figure

    build, data = named_build(options.build, BUILD), named_data(options.data, DATA)
    given = {"budget_s": options.budget, "cache_bytes": options.cache_bytes}
    budgets = {name: value for name, value in given.items() if value is not None}
    profile = profile_input_pipeline(
        build, data, batch_size=options.batch_size, remedies=not options.no_remedies, **budgets
    )
    record, figure = options.output / _RECORD, options.output / _FIGURE
    profile.save(record)
    save_figure(plot_input_pipeline(profile), figure)
    print("\n".join(input_lines(profile)))
    print(f"record: {record}\nfigure: {figure}")
