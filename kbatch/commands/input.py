"""`kbatch input`: whether the data is the bottleneck."""

import argparse
import inspect
from pathlib import Path
from typing import Any

from kbatch.commands.named_function import named

_RECORD, _FIGURE = "input.json", "input.png"


def add_input(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("input", help="tell whether the data is the bottleneck")
    parser.add_argument("build", metavar="MODULE:BUILD", help="function that builds the model")
    parser.add_argument(
        "--data",
        required=True,
        metavar="MODULE:DATA",
        help="dataset, PyDataset or arrays, or a function that makes them",
    )
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
        "-o",
        "--output",
        type=Path,
        default=Path("kbatch-input"),
        metavar="DIR",
        help="where record and figure go (%(default)s)",
    )
    parser.set_defaults(run=_input)


def _input(options: argparse.Namespace) -> None:
    from kbatch.instruments.quiet_start import quiet_start

    with quiet_start():
        from kbatch.profiling.input_pipeline import profile_input_pipeline
    from kbatch.reporting.figures.input_pipeline import plot_input_pipeline
    from kbatch.reporting.figures.saving import save_figure
    from kbatch.reporting.input_text import input_lines

    build = _model(named(options.build, "MODULE:BUILD"), options.build)
    data = _data(named(options.data, "--data"))
    budget = {} if options.budget is None else {"budget_s": options.budget}
    profile = profile_input_pipeline(
        build, data, batch_size=options.batch_size, remedies=not options.no_remedies, **budget
    )
    record, figure = options.output / _RECORD, options.output / _FIGURE
    profile.save(record)
    save_figure(plot_input_pipeline(profile), figure)
    print("\n".join(input_lines(profile)))
    print(f"record: {record}\nfigure: {figure}")


def _model(given: Any, name: str) -> Any:
    if callable(given) or hasattr(given, "build"):
        return given
    raise ValueError(
        "`MODULE:BUILD` must name a compiled model or a function that returns one. "
        f"Received: {name}, a {type(given).__name__}."
    )


def _data(given: Any) -> Any:
    """Calls a function that makes the data; one that wants a batch size is called with it later."""
    if not inspect.isroutine(given):
        return given
    required = [
        parameter
        for parameter in inspect.signature(given).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return given if required else given()
