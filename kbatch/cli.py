"""The command line of kbatch."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kbatch import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from kbatch.records.study import Study

# Columns of a table in a log file, where no terminal tells its width.
_LOG_WIDTH = 120
_DEMO_SIZES = "16,32,64,128,256,512,1024"
_QUICK_SIZES = "32,128,512"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after `kbatch`; those of the process if None.

    Returns:
        The exit status: 0, 1 after an error that is told in one line, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (OSError, ValueError, ImportError) as error:
        print(f"kbatch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kbatch: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kbatch", description="Which batch size should I use, and why?"
    )
    parser.add_argument("--version", action="version", version=f"kbatch {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_demo(commands)
    _add_report(commands)
    _add_plot(commands)
    _add_export(commands)
    return parser


def _add_demo(commands) -> None:
    demo = commands.add_parser("demo", help="search batch sizes on handwritten digits")
    demo.add_argument("--quick", action="store_true", help="three batch sizes, few epochs")
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("kbatch-demo"),
        metavar="DIR",
        help="where results go (%(default)s)",
    )
    demo.add_argument(
        "--policy", default="mixed_float16", metavar="NAME", help="Keras dtype policy (%(default)s)"
    )
    demo.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of weights and order (%(default)s)"
    )
    demo.add_argument("--batch-sizes", metavar="N,N,...", help=f"sizes to try ({_DEMO_SIZES})")
    demo.set_defaults(run=_demo)


def _add_report(commands) -> None:
    report = commands.add_parser("report", help="write a report of a study")
    _add_study_arguments(report, "kbatch-report.html", "report to write, .html or .md")
    report.set_defaults(run=_report)


def _add_plot(commands) -> None:
    plot = commands.add_parser("plot", help="draw samples/s and validation accuracy per trial")
    _add_study_arguments(plot, "kbatch-trials.png", "figure to write, .png, .svg or .pdf")
    plot.set_defaults(run=_plot)


def _add_export(commands) -> None:
    export = commands.add_parser("export", help="write the trials as a table")
    _add_study_arguments(export, "kbatch-trials.csv", "table to write, .csv or .json")
    export.set_defaults(run=_export)


def _add_study_arguments(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    parser.add_argument("study", type=Path, metavar="DIR", help="project directory of a search")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), help=f"{text} (%(default)s)"
    )


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from kbatch.analysis.batch_sizes import check_batch_sizes
    from kbatch.instruments.quiet_start import quiet_start

    sizes, epochs = (_QUICK_SIZES, 4) if options.quick else (_DEMO_SIZES, 20)
    batch_sizes = check_batch_sizes(_integers(options.batch_sizes or sizes))
    _make_directory(options.output)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_LOG_WIDTH)
    console.print("Starting TensorFlow ...", highlight=False)
    with quiet_start():
        from kbatch.demo import run_demo
    study = run_demo(
        options.output,
        console,
        batch_sizes=batch_sizes,
        epochs=epochs,
        dtype_policy=options.policy,
        seed=options.seed,
    )
    _print_table(study, console)
    _print_decision(study, console)
    _write_results(study, options.output, console)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"`--output` must be a directory that can be made and written ({error.strerror}): give "
            f"another one. Received: --output {directory}."
        ) from error


def _write_results(study: "Study", directory: Path, console: "Console") -> None:
    from kbatch.reporting.figures.saving import save_figure
    from kbatch.reporting.figures.trials import plot_trials
    from kbatch.reporting.report import write_report

    figure, report = directory / "trials.png", directory / "report.html"
    save_figure(plot_trials(study), figure)
    write_report(study, report)
    for name, path in (("figure", figure), ("report", report)):
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def _print_table(study: "Study", console: "Console") -> None:
    """Prints the trials; what is the same in all of them stands in a line below."""
    from rich import box
    from rich.table import Table

    from kbatch.reporting.trial_table import trial_table

    content = trial_table(study)
    rows = [row.texts for row in content.rows]
    if console.width < _LOG_WIDTH:  # Spreads stand in the report.
        rows = [tuple(_without_spread(text) for text in row) for row in rows]
    varying = [i for i in range(len(content.columns)) if len({row[i] for row in rows}) > 1]
    shared = [i for i in range(len(content.columns)) if i not in varying]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in varying:
        column = content.columns[i]
        texts = [*column.title.split(), *(row[i] for row in rows)]
        justify = "right" if column.numeric else "left"
        table.add_column(column.title, justify=justify, width=max(map(len, texts)))
    for row, trial in zip(rows, content.rows, strict=True):
        table.add_row(*(row[i] for i in varying), style="bold" if trial.best else None)
    console.print(table)
    if shared and rows:
        first = rows[0]
        same = ", ".join(f"{content.columns[i].title.lower()} {first[i]}" for i in shared)
        console.print(f"in every trial: {same}", highlight=False, soft_wrap=True)


def _without_spread(text: str) -> str:
    return text if text.startswith("n/a") else text.partition(" (")[0]


def _print_decision(study: "Study", console: "Console") -> None:
    from kbatch.reporting.decision import decision

    words = decision(study)
    sentences = [words.headline, words.speed, words.compared, words.certainty]
    console.print(" ".join(filter(None, sentences)), highlight=False)


def _report(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study
    from kbatch.reporting.report import write_report

    write_report(load_study(options.study), options.output)
    print(options.output)


def _plot(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study
    from kbatch.reporting.figures.saving import save_figure
    from kbatch.reporting.figures.trials import plot_trials

    save_figure(plot_trials(load_study(options.study)), options.output)
    print(options.output)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.loading import load_study

    table = load_study(options.study).to_dataframe()
    if options.output.suffix == ".csv":
        table.to_csv(options.output, index=False)
    elif options.output.suffix == ".json":
        table.to_json(options.output, orient="records", indent=1)
    else:
        raise ValueError(
            f"`--output` must end in .csv or .json. Received: --output {options.output}."
        )
    print(options.output)


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(
            "`--batch-sizes` must be integers with commas between them, such as 16,32,64. "
            f"Received: --batch-sizes {text}."
        ) from error
