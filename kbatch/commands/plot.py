"""`kbatch plot`: a figure of a study."""

import argparse
from typing import Any

from kbatch.commands.study_arguments import add_study_arguments


def add_plot(commands: Any) -> None:
    """Adds the command."""
    plot = commands.add_parser("plot", help="draw samples/s and validation accuracy per trial")
    add_study_arguments(plot, "kbatch-trials.png", "figure to write, .png, .svg or .pdf")
    plot.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study
    from kbatch.reporting.figures.saving import save_figure
    from kbatch.reporting.figures.trials import plot_trials

    save_figure(plot_trials(load_study(options.study)), options.output)
    print(options.output)
