"""The command line of kbatch.

Each command that measures calls one public function. An option has the name of the function's
argument and is passed on only if it was given, so each default is written in one place only.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbatch import __version__
from kbatch.cli.arguments import (
    Parser,
    batch_sizes,
    memory_size,
    milliseconds,
    name_text,
    named_build,
    named_data,
    named_x_y,
    starting_tensorflow,
    words,
)
from kbatch.cli.demo import add_demo
from kbatch.cli.doctor import add_doctor
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.recommendation import BUDGET_S
from kbatch.records.notes import Note
from kbatch.search import BASE_BATCH_SIZE

# Names of figures, `plot_...` without the prefix. The first group takes one study or several, the
# second one study. `memory` takes the file of `kbatch max-batch --output`.
SHARED_FIGURES = ("trials", "learning-rates", "pareto", "learning-curves", "time-to-target")
STUDY_FIGURES = (*SHARED_FIGURES, "noise-scale", "gpu-timeline", "search")
FIGURES = (*STUDY_FIGURES, "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name may contain bytes that the terminal's encoding cannot print.
        sys.stdout.reconfigure(errors="backslashreplace")
    names: dict[str, str] = {}
    try:
        options = command_parser().parse_args(arguments)
        names = vars(options).get("names", names)
        options.run(options)
        sys.stdout.flush()
    except (OSError, ValueError, ImportError, MemoryError) as error:
        text = with_options(str(error), names)
        # Notes hold the traceback of a worker process.
        print("\n".join([f"kbatch: {text}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # Otherwise Python reports a second error when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("kbatch: interrupted", file=sys.stderr)
        return 130
    return 0


def command_parser() -> Parser:
    parser = Parser(prog="kbatch", description="Which batch size should I use, and why?")
    parser.add_argument("--version", action="version", version=f"kbatch {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_demo(commands)
    add_doctor(commands)
    _add_max_batch(commands)
    _add_inference(commands)
    _add_input(commands)
    _add_recommend(commands)
    _add_report(commands)
    _add_plot(commands)
    _add_export(commands)
    return parser


# Options whose argument has another name in the errors of functions.
_ALIASES = {"output": "path", "policy": "dtype_policy"}


def with_options(text: str, names: Mapping[str, str]) -> str:
    """Replace the names of arguments in an error by the names of a command's options."""
    for name, option in names.items():
        text = re.sub(rf"\b{name}=", f"{option} ", text.replace(f"`{name}`", f"`{option}`"))
    return text


_DATA_TEXT = "function that returns (x, y) or a dataset, or takes batch_size and returns a dataset"
_LIMIT_TEXT = "memory limit, such as 2GiB (default: the whole GPU, or half of the free host memory)"


def _parser(
    commands: Any, name: str, run: Callable[..., None], help_text: str, data: str = ""
) -> Any:
    """Add a command, and return the function that adds its options.

    If `data` is given, the command takes a build function and `--data`. `data` is its help text.
    """
    parser = commands.add_parser(name, help=help_text)
    names: dict[str, str] = {}  # Names of options, by the name of the argument.
    parser.set_defaults(run=run, names=names)

    def add(*flags: str, **settings: Any) -> None:
        action = parser.add_argument(*flags, **settings)
        if action.option_strings and action.nargs != 0:
            name, option = str(action.dest), action.option_strings[-1]
            names[name] = names[_ALIASES.get(name, name)] = option

    if data:
        build = "function that returns the compiled model"
        add("build", type=name_text, metavar="MODULE:BUILD", help=build)
        add("--data", required=True, type=name_text, metavar="MODULE:DATA", help=data)
    return add


def _add_verbose(add: Callable[..., Any]) -> None:
    text = "0: no progress; 1: a bar in a terminal, lines in a log; 2: lines (default: 1)"
    add("--verbose", type=int, choices=(0, 1, 2), help=text)


def _function_arguments(options: argparse.Namespace, *others: str) -> dict[str, Any]:
    """Return the given options as arguments for the function that the command calls."""
    left_out = ("run", "names", "build", "data", "output", *others)
    given = {n: v for n, v in vars(options).items() if v is not None and n not in left_out}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}


def _write(result: Any, record: Path | None, *figures: tuple[Path, Any]) -> None:
    """Print a result, and write its file and its figures."""
    from kbatch.plotting.canvas import save_figure

    print(result)
    if record is not None:
        result.save(record)
        print(f"result: {record}")
    for path, draw in figures:
        save_figure(draw(None), path)
        print(f"figure: {path}")


def _add_inference(commands: Any) -> None:
    text = "measure latency, throughput and memory of predictions by batch size"
    add = _parser(commands, "inference", _inference, text)
    file = "a saved model: .keras, .h5, .onnx, .tflite or the folder of a SavedModel"
    add("model", type=Path, metavar="MODEL", help=file)
    slo = "latency target, such as 20ms; finds the largest batch size that meets it"
    add("--slo", dest="latency_slo_ms", type=milliseconds, metavar="TIME", help=slo)
    share = "share of calls that must meet the target (default: %(default)s)"
    add("--quantile", type=float, default=0.95, metavar="Q", help=share)
    paths = "how to call a Keras model: compiled, xla, predict, saved_model (default: %(default)s)"
    names = {"type": words, "metavar": "NAME,..."}
    add("--paths", dest="call_paths", default="compiled", **names, help=paths)
    policies = "Keras dtype policies or int8 to measure (default: the model's own)"
    add("--policies", dest="dtype_policies", **names, help=policies)
    add("--batch-sizes", type=batch_sizes, metavar="N,...", help="sizes (default: powers of two)")
    seconds = {"dest": "time_budget_s", "type": float, "default": TIME_BUDGET_S, "metavar": "S"}
    add("--seconds", **seconds, help="time budget in seconds (default: %(default)s)")
    bulk = "examples in each `predict` call, which splits them into batches (default: %(default)s)"
    add("--bulk-examples", type=int, default=BULK_EXAMPLES, metavar="N", help=bulk)
    memory = {"dest": "measure_memory", "action": "store_false"}
    add("--no-memory", **memory, help="do not measure memory")
    output = {"type": Path, "default": Path("kbatch-inference"), "metavar": "DIR"}
    add("-o", "--output", **output, help="folder for the results (default: %(default)s)")
    _add_verbose(add)


def _inference(options: argparse.Namespace) -> None:
    arguments = _function_arguments(options, "model")
    if not options.model.exists():
        raise ValueError(
            "MODEL does not exist: give a .keras, .h5, .onnx or .tflite file, or the folder of a "
            f"SavedModel. Received: {options.model}."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    with starting_tensorflow():
        from kbatch.inference.functions import load_model_file
        from kbatch.inference.measure import profile_inference

    model, x = load_model_file(options.model)
    profile = profile_inference(model, x, **arguments)
    if x is not None:
        noted = (Note.of("inputs_made"), *profile.noted)
        profile = dataclasses.replace(profile, noted=noted)
    profile.table().to_csv(options.output / "profile.csv", index=False)
    figures = ((options.output / f"{figure.name}.png", figure.draw) for figure in profile.figures())
    _write(profile, options.output / "profile.json", *figures)


def _add_input(commands: Any) -> None:
    data = "dataset, PyDataset or arrays, or a function that returns one of these"
    add = _parser(commands, "input", _input, "find out whether data loading limits speed", data)
    add("--batch-size", type=int, metavar="N", help="batch size (default: the dataset's)")
    seconds = {"dest": "time_budget_s", "type": float, "metavar": "SECONDS"}
    add("--budget", **seconds, help="time budget in seconds")
    add("--no-remedies", dest="remedies", action="store_false", help="do not try faster pipelines")
    add("--cache-bytes", type=int, metavar="BYTES", help="memory that a cache may use")
    output = {"type": Path, "default": Path("kbatch-input"), "metavar": "DIR"}
    add("-o", "--output", **output, help="folder for result and figure (default: %(default)s)")
    _add_verbose(add)


def _input(options: argparse.Namespace) -> None:
    arguments = _function_arguments(options)
    with starting_tensorflow():
        from kbatch.input_pipeline.measure import profile_input_pipeline
    model, data = named_build(options.build), named_data(options.data)
    profile = profile_input_pipeline(model, data, **arguments)
    _write(profile, options.output / "input.json", (options.output / "input.png", profile.plot))


def _add_max_batch(commands: Any) -> None:
    text = "find the largest batch that fits in memory"
    add = _parser(commands, "max-batch", _max_batch, text, _DATA_TEXT)
    add("--limit", dest="memory_limit_bytes", type=memory_size, metavar="SIZE", help=_LIMIT_TEXT)
    window = {"dest": "memory_window", "type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    text = "end the search at a batch that fills LOW to HIGH of the limit (default: 0.8 0.9)"
    add("--window", **window, help=text)
    add("--max", dest="max_batch_size", type=int, metavar="N", help="largest batch size to try")
    training = {"dest": "training", "action": "store_false"}
    add("--inference", **training, help="run predictions instead of train steps")
    add("--policy", metavar="NAME", help="Keras dtype policy of the model, such as mixed_float16")
    add("-o", "--output", type=Path, metavar="FILE", help="JSON file for the result")
    _add_verbose(add)


def _max_batch(options: argparse.Namespace) -> None:
    arguments = _function_arguments(options, "policy")
    with starting_tensorflow():
        from kbatch.memory.find import find_max_batch_size
        from kbatch.training.dtype_policy import check_dtype_policies, dtype_policy_scope
    build, (x, y) = named_build(options.build), named_x_y(options.data)
    policy = options.policy and check_dtype_policies(options.policy)[0]
    with dtype_policy_scope(policy) if policy else contextlib.nullcontext():
        _write(find_max_batch_size(build, x, y, **arguments), options.output)


def _add_recommend(commands: Any) -> None:
    text = "recommend a batch size to start with, and say what limits it"
    add = _parser(commands, "recommend", _recommend, text, _DATA_TEXT)
    base = "batch size for which the learning rate was chosen (default: %(default)s)"
    add("--base-batch-size", type=int, default=BASE_BATCH_SIZE, metavar="N", help=base)
    add("--limit", dest="memory_limit_bytes", type=memory_size, metavar="SIZE", help=_LIMIT_TEXT)
    seconds = {"dest": "time_budget_s", "type": float, "default": BUDGET_S, "metavar": "SECONDS"}
    add("--budget", **seconds, help="time budget in seconds (default: %(default)s)")
    add("--seed", type=int, metavar="N", help="seed of the run that measures gradient noise")
    add("-o", "--output", type=Path, metavar="FILE", help="JSON file for the result")
    add("--figure", type=Path, metavar="FILE", help=".png, .svg or .pdf file for the figure")
    _add_verbose(add)


def _recommend(options: argparse.Namespace) -> None:
    arguments = _function_arguments(options, "figure")
    if options.figure is not None and options.figure.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--figure` must end in .png, .svg or .pdf. Received: --figure {options.figure}."
        )
    with starting_tensorflow():
        from kbatch.recommendation.measure import recommend

    (x, y), build = named_x_y(options.data), named_build(options.build)
    recommendation = recommend(build, x, y, **arguments)
    figures = [(options.figure, recommendation.plot)] if options.figure else []
    _write(recommendation, options.output, *figures)


def _add_report(commands: Any) -> None:
    add = _parser(commands, "report", _report, "write a report of a study or of profiles")
    records = (
        "project directory of a search, or JSON file of a study, profile or result; several are "
        "shown in one report, which compares the studies"
    )
    add("records", type=Path, nargs="+", metavar="DIR|FILE", help=records)
    output = {"type": Path, "default": Path("kbatch-report.html")}
    add("-o", "--output", **output, help=".html or .md file to write (default: %(default)s)")


def _report(options: argparse.Namespace) -> None:
    from kbatch.report import write_report

    records = _named_by_path(options.records, [load_result(path) for path in options.records])
    for record in records:
        _say_problems(record)
        progress = getattr(record, "progress", None)
        if progress is not None and progress.process is not None:
            print(record.answer)
    gc.freeze()  # Otherwise the garbage collector slows drawing: it visits every record each time.
    for path in write_report(records, options.output):
        print(path)


def load_result(path: Path) -> Any:
    """Load a study from the folder of its search, or any result from its JSON file."""
    from kbatch.errors import RecordError
    from kbatch.page.result import FIGURES as RESULTS
    from kbatch.records.json_codec import damaged, read_json, shown
    from kbatch.study.study import load_study

    # `kbatch inference` and `kbatch input` write one of these into their folder.
    path = next(filter(Path.is_file, (path, path / "profile.json", path / "input.json")), path)
    if not path.is_file():
        return load_study(path)
    try:
        kind = shown(read_json(path)["kind"], str)
    except (KeyError, TypeError) as error:
        raise damaged(str(path)) from error
    if kind not in RESULTS:
        raise RecordError(
            f"{path} holds a record of type {kind}, which kbatch cannot show: give a file of type "
            f"{', '.join(RESULTS)}, or the folder of a search (`directory/project_name`)."
        )
    public = importlib.import_module("kbatch")
    return load_study(path) if kind == "Study" else getattr(public, kind).load(path)


def _named_by_path(paths: Sequence[Path], results: Sequence[Any]) -> list[Any]:
    """Name studies by their paths if two of them have the same name."""
    names = [getattr(result, "name", None) for result in results]
    return [
        dataclasses.replace(result, name=str(path)) if name and names.count(name) > 1 else result
        for path, result, name in zip(paths, results, names, strict=True)
    ]


def _say_problems(record: Any) -> None:
    for problem in getattr(record, "problems", ()):
        print(f"kbatch: left out: {problem}", file=sys.stderr)


def _add_plot(commands: Any) -> None:
    add = _parser(commands, "plot", _plot, "draw a figure of a study or of a profile")
    figures = f"one of {', '.join(FIGURES)} (default: %(default)s)"
    records = "one or more project directories of searches, which are drawn in one figure"
    records += "; for a profile or result, give its folder or JSON file alone, and no `--figure`"
    add("studies", type=Path, nargs="+", metavar="DIR|FILE", help=records)
    add("--figure", choices=FIGURES, default=FIGURES[0], metavar="NAME", help=figures)
    target = "with `--figure time-to-target`: the metric's target (default: the search's target)"
    add("--target", type=float, metavar="VALUE", help=target)
    width = "width of the figure, such as 3.4 for a column of a paper (default: 6.4)"
    add("--width", type=float, metavar="INCHES", help=width)
    output = ".png, .svg or .pdf file to write (default: kbatch-NAME.png)"
    add("-o", "--output", type=Path, help=output)


def _plot(options: argparse.Namespace) -> None:
    from kbatch.memory.result import MaxBatchSizeResult
    from kbatch.plotting.canvas import draw_so_wide, save_figure
    from kbatch.study.study import Study

    name, output = options.figure, options.output or Path(f"kbatch-{options.figure}.png")
    if options.target is not None and name != "time-to-target":
        raise ValueError(
            "`--target` works with `--figure time-to-target` only. "
            f"Received: --figure {name} --target {options.target}."
        )
    load, kind = load_result, Study
    if name == "memory":
        load, kind = MaxBatchSizeResult.load, MaxBatchSizeResult
    results = _named_by_path(options.studies, [load(path) for path in options.studies])
    others = [type(result).__name__ for result in results if not isinstance(result, kind)]
    if others and (len(results) > 1 or name != FIGURES[0]):
        raise ValueError(
            "`kbatch plot` draws only the main figure of a profile or result: give its file alone, "
            f"without `--figure`. `kbatch report` shows all figures. Received: {others[0]}."
        )
    if len(results) > 1 and name not in SHARED_FIGURES:
        raise ValueError(
            f"`--figure {name}` shows one study. For several studies, choose one of "
            f"{', '.join(SHARED_FIGURES)}. Received: {len(results)} studies."
        )
    if len(results) > 1:
        from kbatch.study.comparison import compare

        print(f"{compare(results)}\n")
    plot = getattr(importlib.import_module("kbatch"), f"plot_{name.replace('-', '_')}")
    target = {} if options.target is None else {"target": options.target}
    draw = functools.partial(plot, results if results[1:] else results[0], **target)
    draw = draw if isinstance(results[0], kind) else results[0].plot
    save_figure(draw() if options.width is None else draw_so_wide(draw, options.width), output)
    for result in results:
        _say_problems(result)
    print(output)


def _add_export(commands: Any) -> None:
    text = "write the trials or the training runs to a table or to an experiment tracker"
    add = _parser(commands, "export", _export, text)
    study = "project directory of a search, or a file that `Study.save` wrote"
    add("study", type=Path, metavar="DIR", help=study)
    add("--runs", action="store_true", help="write one row for each training run, not each trial")
    table = ".csv or .json file to write (default: kbatch-trials.csv, or kbatch-runs.csv)"
    add("-o", "--output", type=Path, help=table)
    tracker = (
        "send the runs to this tracker, except runs that it already has. Environment variables "
        "such as MLFLOW_TRACKING_URI configure it. To also write a table, give -o"
    )
    add("--to", choices=("mlflow", "wandb"), help=tracker)


def _export(options: argparse.Namespace) -> None:
    from kbatch.records.json_codec import write_whole_file
    from kbatch.study.study import load_study, refuse_empty

    output = options.output or Path(f"kbatch-{'runs' if options.runs else 'trials'}.csv")
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
        except Exception as error:  # Trackers and their servers raise many kinds of errors.
            raise OSError(
                f"Writing to {options.to} failed. Run this command again later: it adds the runs "
                f"that {options.to} does not have. Received: {type(error).__name__}: {error}"
            ) from error
        if options.output is None:
            return
    table = study.runs_to_dataframe() if options.runs else study.to_dataframe()
    csv = suffix == ".csv"
    text = table.to_csv(index=False) if csv else table.to_json(orient="records", indent=1)
    write_whole_file(output, str(text).encode())
    print(output)
