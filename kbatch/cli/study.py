"""The commands that read a study: `report`, `plot`, `export`, and `demo`, which makes one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.study.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kbatch.study.study import Study


def add_report(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser("report", help="write a report of a study or of profiles")
    report.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="DIR|FILE",
        help="project directory of a search, or the JSON file of a study, profile or result; "
        "several make one document",
    )
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kbatch-report.html"),
        help="report to write, .html or .md (%(default)s)",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from kbatch.report.load import load_record
    from kbatch.report.pages import write_report

    records = [load_record(path) for path in options.records]
    for path in write_report(records, options.output):
        print(path)


def add_plot(commands: Any) -> None:
    """Add the command."""
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
    from kbatch.study.figures import draw_figure

    output = options.output or Path(f"kbatch-{options.figure}.png")
    axes = draw_figure(options.figure, options.study, target=options.target, width_in=options.width)
    save_figure(axes, output)
    print(output)


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


def add_export(commands: Any) -> None:
    """Add the command."""
    export = commands.add_parser("export", help="write the trials as a table")
    add_study_arguments(export, "kbatch-trials.csv", "table to write, .csv or .json")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.json_codec import write_whole_file
    from kbatch.study.decision import refuse_empty
    from kbatch.study.loading import load_study

    suffix = options.output.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(
            f"`--output` must end in .csv or .json. Received: --output {options.output}."
        )
    study = load_study(options.study)
    refuse_empty(study)
    table = study.to_dataframe()
    if suffix == ".csv":
        text = table.map(_no_formula).rename(columns=_no_formula).to_csv(index=False)
    else:
        text = table.to_json(orient="records", indent=1)
    write_whole_file(options.output, str(text).encode())
    print(options.output)


def _no_formula(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    if not isinstance(cell, str):
        return cell
    # pandas does not quote a carriage return, which would begin a new row.
    text = cell.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def add_study_arguments(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Add the project directory and the `--output` of a command that reads a study."""
    parser.add_argument("study", type=Path, metavar="DIR", help="project directory of a search")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), help=f"{text} (%(default)s)"
    )


# Columns of a table in a log file, where no terminal tells its width.
LOG_WIDTH = 120
_FEWEST_COLUMNS = 4


def print_trials(study: "Study", console: "Console") -> None:
    """Print the trials; what is the same in all of them stands in a line below."""
    from rich import box
    from rich.table import Table

    from kbatch.study.table import trial_table

    content = trial_table(study)
    rows = [row.texts for row in content.rows]
    titles = [column.title for column in content.columns]
    for shorter in (_without_spread, _without_reason):
        # What is left out here stands in the report.
        if _width(titles, rows, _varying(rows)) > console.width:
            rows = [tuple(shorter(text) for text in row) for row in rows]
    varying = _varying(rows)
    shown = varying
    while len(shown) > _FEWEST_COLUMNS and _width(titles, rows, shown) > console.width:
        shown = shown[:-1]
    shared = [i for i in range(len(content.columns)) if i not in varying]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in shown:
        column = content.columns[i]
        justify = "right" if column.numeric else "left"
        table.add_column(column.title, justify=justify, width=_column_width(titles, rows, i))
    for row, trial in zip(rows, content.rows, strict=True):
        table.add_row(*(row[i] for i in shown), style="bold" if trial.best else None)
    console.print(table)
    if left_out := [titles[i].lower() for i in varying if i not in shown]:
        console.print(f"in the report too: {', '.join(left_out)}", highlight=False, soft_wrap=True)
    if shared and rows:
        first = rows[0]
        same = ", ".join(f"{content.columns[i].title.lower()} {first[i]}" for i in shared)
        console.print(f"in every trial: {same}", highlight=False, soft_wrap=True)


def _varying(rows: "Sequence[tuple[str, ...]]") -> list[int]:
    return [i for i, texts in enumerate(zip(*rows, strict=True)) if len(set(texts)) > 1]


def _width(
    titles: "Sequence[str]", rows: "Sequence[tuple[str, ...]]", columns: "Sequence[int]"
) -> int:
    """Return the characters of a line: two between columns, one at each end."""
    return 2 + sum(_column_width(titles, rows, i) + 2 for i in columns)


def _column_width(titles: "Sequence[str]", rows: "Sequence[tuple[str, ...]]", column: int) -> int:
    """Return the width of a column's longest text; its title may take a line a word."""
    return max(map(len, [*titles[column].split(), *(row[column] for row in rows)]))


def _without_reason(text: str) -> str:
    return text.partition(" (")[0]


def _without_spread(text: str) -> str:
    return text if text.startswith("n/a") else text.partition(" (")[0]


def print_decision(study: "Study", console: "Console") -> None:
    """Print which batch size to use, and how sure that is."""
    from kbatch.study.decision import decision

    words = decision(study)
    sentences = [words.headline, words.speed, words.limit, words.compared, words.certainty]
    console.print(" ".join(filter(None, sentences)), highlight=False)


_DEMO_SIZES = "16,32,64,128,256,512,1024"
_QUICK_SIZES = "32,128,512"


def add_demo(commands: Any) -> None:
    """Add the command."""
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
        "--policy",
        metavar="NAME",
        help="Keras dtype policy (mixed_float16; float32 on a processor with very slow float16)",
    )
    demo.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of weights and order (%(default)s)"
    )
    demo.add_argument("--batch-sizes", metavar="N,N,...", help=f"sizes to try ({_DEMO_SIZES})")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from kbatch.analysis.batch_sizes import check_batch_sizes
    from kbatch.device.quiet_start import quiet_start

    sizes, epochs = (_QUICK_SIZES, 4) if options.quick else (_DEMO_SIZES, 20)
    batch_sizes = check_batch_sizes(_integers(options.batch_sizes or sizes))
    _make_directory(options.output)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=LOG_WIDTH)
    console.print("Starting TensorFlow ...", highlight=False)
    with quiet_start():
        from kbatch.cli.demo import default_policy, run_demo
        from kbatch.training.dtype_policy import float16_slowdown
    policy, why = (options.policy, None) if options.policy else default_policy(float16_slowdown())
    if why is not None:
        console.print(why, highlight=False, soft_wrap=True)
    study = run_demo(
        options.output,
        batch_sizes=batch_sizes,
        epochs=epochs,
        dtype_policy=policy,
        seed=options.seed,
    )
    print_trials(study, console)
    print_decision(study, console)
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
    from kbatch.plotting.saving import save_figure
    from kbatch.report.pages import write_report
    from kbatch.study.figures.trials import plot_trials

    figure, report = directory / "trials.png", directory / "report.html"
    save_figure(plot_trials(study), figure)
    write_report(study, report)
    for name, path in (("figure", figure), ("report", report)):
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(
            "`--batch-sizes` must be integers with commas between them, such as 16,32,64. "
            f"Received: --batch-sizes {text}."
        ) from error
