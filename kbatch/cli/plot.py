"""`kbatch plot`: a figure of a study."""

import argparse
from pathlib import Path
from typing import Any

from kbatch.study.figures.catalogue import FIGURES


def add_plot(commands: Any) -> None:
    """Adds the command."""
    plot = commands.add_parser("plot", help="draw a figure of a study")
    plot.add_argument(
        "study",
        type=Path,
        metavar="DIR",
        help="project directory of a search; for the figure memory the file of a max-batch result",
    )
    plot.add_argument(
        "--figure",
        default=FIGURES[0],
        metavar="NAME",
        help=f"which one (%(default)s): {', '.join(FIGURES)}",
    )
    plot.add_argument(
        "--target",
        type=float,
        metavar="VALUE",
        help="for time-to-target, the value of the metric to come to (that of StopAtTarget)",
    )
    plot.add_argument(
        "--width",
        type=float,
        metavar="INCHES",
        help="width of the figure (6.4), such as 3.4 for a column; texts keep their size of 8 pt",
    )
    plot.add_argument(
        "-o",
        "--output",
        type=Path,
        help="figure to write, .png, .svg or .pdf (kbatch-NAME.png)",
    )
    plot.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> None:
    from kbatch.plotting.saving import save_figure
    from kbatch.study.figures.catalogue import draw_figure

    output = options.output or Path(f"kbatch-{options.figure}.png")
    axes = draw_figure(options.figure, options.study, target=options.target, width_in=options.width)
    save_figure(axes, output)
    print(output)
