"""The commands that read a study: `report`, `plot` and `export`."""

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.study.figures import FIGURES, study_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="write a report of a study or of profiles")
    records = (
        "project directory of a search, or the JSON file of a study, profile or result; "
        "several make one document"
    )
    report.add_argument("records", type=Path, nargs="+", metavar="DIR|FILE", help=records)
    output = {"type": Path, "default": Path("kbatch-report.html")}
    report.add_argument("-o", "--output", **output, help=".html or .md to write (%(default)s)")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from kbatch.page.result import write_report

    records = [load_result(path) for path in options.records]
    for record in records:
        _say_problems(record)
    for path in write_report(records, options.output):
        print(path)


def load_result(path: Path) -> Any:
    """Read a study from the folder of its search, or whatever result a JSON file holds."""
    from kbatch.inference.result import InferenceProfile
    from kbatch.input_pipeline.result import InputPipelineProfile
    from kbatch.memory.result import MaxBatchSizeResult
    from kbatch.recommendation.result import Recommendation
    from kbatch.records.json_codec import RecordError, read_json, shown
    from kbatch.study.study import load_study
    from kbatch.throughput.result import TrainingProfile

    if not path.is_file():
        return load_study(path)
    try:
        kind = shown(read_json(path)["kind"], str)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is no kbatch record or is damaged: {error!r}.") from error
    kinds = (InferenceProfile, InputPipelineProfile, MaxBatchSizeResult, Recommendation)
    loads: dict[str, Any] = {one.__name__: one.load for one in (*kinds, TrainingProfile)}
    loads["Study"] = load_study
    if kind not in loads:
        raise RecordError(
            f"{path} holds a {kind}: a file must hold one of {', '.join(loads)}. For a study "
            "give the folder of its search (`directory/project_name`)."
        )
    return loads[kind](path)


def _say_problems(record: Any) -> None:
    for problem in getattr(record, "problems", ()):
        print(f"kbatch: left out: {problem}", file=sys.stderr)


def add_plot(commands: Any) -> None:
    plot = commands.add_parser("plot", help="draw a figure of a study")
    add, figures = plot.add_argument, f"which one (%(default)s): {', '.join(FIGURES)}"
    study = "project directory of a search; for the figure memory the file of a max-batch result"
    add("study", type=Path, metavar="DIR", help=study)
    add("--figure", choices=FIGURES, default=FIGURES[0], metavar="NAME", help=figures)
    target = "for time-to-target, value of the metric to reach (default: that of StopAtTarget)"
    add("--target", type=float, metavar="VALUE", help=target)
    width = "width of the figure (6.4), such as 3.4 for a column; texts keep their size of 8 pt"
    add("--width", type=float, metavar="INCHES", help=width)
    add("-o", "--output", type=Path, help=".png, .svg or .pdf to write (kbatch-NAME.png)")
    plot.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> None:
    from kbatch.memory.result import MaxBatchSizeResult
    from kbatch.plotting.canvas import save_figure
    from kbatch.study.study import load_study

    name, output = options.figure, options.output or Path(f"kbatch-{options.figure}.png")
    if options.target is not None and name != "time-to-target":
        raise ValueError(
            "A target belongs to the figure `time-to-target`. "
            f"Received: target={options.target} for {name!r}."
        )
    result = (MaxBatchSizeResult.load if name == "memory" else load_study)(options.study)
    save_figure(draw_figure(name, result, options.target, options.width), output)
    _say_problems(result)
    print(output)


def draw_figure(name: str, result: Any, target: float | None, width_in: float | None) -> "Axes":
    """Draw a figure of a study, or the figure of a search for the largest batch."""
    from kbatch.plotting.canvas import draw_so_wide

    draw = result.plot
    if name != "memory":
        given = {} if target is None else {"target": target}
        draw = functools.partial(study_plot(name), result, **given)
    return draw() if width_in is None else draw_so_wide(draw, width_in)


def add_export(commands: Any) -> None:
    text = "write the trials as a table, or to an experiment tracker"
    export = commands.add_parser("export", help=text)
    study = "project directory of a search, or a file that `Study.save` wrote"
    export.add_argument("study", type=Path, metavar="DIR", help=study)
    table = ".csv or .json to write (kbatch-trials.csv)"
    export.add_argument("-o", "--output", type=Path, help=table)
    tracker = (
        "write to a tracker what is not there yet, the table only with -o; the "
        "tracker is set up by its own variables, such as MLFLOW_TRACKING_URI"
    )
    export.add_argument("--to", choices=("mlflow", "wandb"), help=tracker)
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.json_codec import write_whole_file
    from kbatch.study.study import load_study, refuse_empty

    output = options.output or Path("kbatch-trials.csv")
    suffix = output.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(f"`--output` must end in .csv or .json. Received: --output {output}.")
    study = load_study(options.study)
    refuse_empty(study)
    _say_problems(study)
    if options.to is not None:
        try:
            print(f"{options.to}: {study.log_to(options.to)}")
        except ImportError:
            raise
        except Exception as error:  # Whatever the tracker raises.
            raise OSError(
                f"{options.to} could not be written: run the same command again once it can be "
                f"reached, which adds what is missing. Received: {type(error).__name__}: {error}"
            ) from error
        if options.output is None:
            return
    table = study.to_dataframe()
    csv = suffix == ".csv"
    text = table.to_csv(index=False) if csv else table.to_json(orient="records", indent=1)
    write_whole_file(output, str(text).encode())
    print(output)
