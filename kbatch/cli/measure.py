"""The commands that measure: `inference`, `input`, `max-batch` and `recommend`.

An option is named as the argument of the function that measures, and passed on where it is given.
"""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbatch.cli.arguments import (
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
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.recommendation import BUDGET_S
from kbatch.search import BASE_BATCH_SIZE

_DATA_TEXT = "function that returns (x, y) or a dataset, or takes a batch size and does so"


def _parser(commands: Any, name: str, run: Callable[..., None], help_text: str, data: str) -> Any:
    """Add a command; `data` describes the option `--data`, which comes with a build function."""
    parser = commands.add_parser(name, help=help_text, argument_default=argparse.SUPPRESS)
    parser.set_defaults(run=run)
    if data:
        build = "function that returns the compiled model"
        parser.add_argument("build", type=name_text, metavar="MODULE:BUILD", help=build)
        given = {"type": name_text, "metavar": "MODULE:DATA", "help": data}
        parser.add_argument("--data", required=True, **given)
    return parser.add_argument


def _given(options: argparse.Namespace, *others: str) -> dict[str, Any]:
    """Return the arguments of the function; two values of an option are a pair."""
    given = vars(options).items()
    left_out = ("run", "build", "data", "output", *others)
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given if n not in left_out}


def _write(result: Any, record: Path | None, *figures: tuple[Path, Any]) -> None:
    """Print a result, and write its record and its figures where they are wanted."""
    from kbatch.plotting.canvas import save_figure

    print(result)
    if record is not None:
        result.save(record)
        print(f"record: {record}")
    for path, draw in figures:
        save_figure(draw(None), path)
        print(f"figure: {path}")


def add_inference(commands: Any) -> None:
    text = "measure latency, throughput and memory of predictions by batch size"
    add = _parser(commands, "inference", _inference, text, data="")
    add("model", type=Path, metavar="MODEL", help="a saved model, .keras or .h5")
    slo = "latency target, such as 20ms: find the largest batch in it"
    add("--slo", dest="latency_slo_ms", type=milliseconds, metavar="TIME", help=slo)
    share = "share of the calls that keep to it (%(default)s)"
    add("--quantile", type=float, default=0.95, metavar="Q", help=share)
    paths = "compiled, xla, predict, saved_model (%(default)s)"
    given = {"type": words, "metavar": "NAME,..."}
    add("--paths", dest="call_paths", default="compiled", **given, help=paths)
    policies = "dtype policies and int8 (the model as it is)"
    add("--policies", dest="dtype_policies", **given, help=policies)
    add("--batch-sizes", type=batch_sizes, metavar="N,N,...", help="sizes (powers of two)")
    seconds = {"dest": "time_budget_s", "type": float, "default": TIME_BUDGET_S, "metavar": "S"}
    add("--seconds", **seconds, help="time budget of the timing (%(default)s)")
    bulk = "examples of a call of predict, which runs no larger batches (%(default)s)"
    add("--bulk-examples", type=int, default=BULK_EXAMPLES, metavar="N", help=bulk)
    memory = {"dest": "measure_memory", "action": "store_false"}
    add("--no-memory", **memory, help="leave the memory out")
    output = {"type": Path, "default": Path("kbatch-inference"), "metavar": "DIR"}
    add("-o", "--output", **output, help="where profile, table and figures go (%(default)s)")


def _inference(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape

    given = _given(options, "model")
    if not options.model.exists():
        raise ValueError(
            "MODEL must be a file that `model.save` wrote, .keras or .h5: it does not exist. "
            f"Received: {options.model}."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    with starting_tensorflow():
        from kbatch.inference.call_paths import load_saved_model
        from kbatch.inference.measure import profile_inference

    model = load_saved_model(options.model)
    with Console(emoji=False).status("measuring") as status:
        given["on_progress"] = lambda line: status.update(escape(line))
        profile = profile_inference(model, **given)
    profile.table().to_csv(options.output / "profile.csv", index=False)
    figures = ((options.output / f"{figure.name}.png", figure.draw) for figure in profile.figures())
    _write(profile, options.output / "profile.json", *figures)


def add_input(commands: Any) -> None:
    data = "dataset, PyDataset or arrays, or a function that makes them"
    add = _parser(commands, "input", _input, "find out whether the data is the bottleneck", data)
    add("--batch-size", type=int, metavar="N", help="examples in a batch (those of the dataset)")
    seconds = {"dest": "budget_s", "type": float, "metavar": "SECONDS"}
    add("--budget", **seconds, help="seconds to spend on measuring")
    changes = "leave out the changes to the pipeline"
    add("--no-remedies", dest="remedies", action="store_false", help=changes)
    cache = "memory that a cache may take when tried"
    add("--cache-bytes", type=int, metavar="BYTES", help=cache)
    output = {"type": Path, "default": Path("kbatch-input"), "metavar": "DIR"}
    add("-o", "--output", **output, help="where record and figure go (%(default)s)")


def _input(options: argparse.Namespace) -> None:
    given = _given(options)
    with starting_tensorflow():
        from kbatch.input_pipeline.measure import profile_input_pipeline
    profile = profile_input_pipeline(named_build(options.build), named_data(options.data), **given)
    _write(profile, options.output / "input.json", (options.output / "input.png", profile.plot))


def add_max_batch(commands: Any) -> None:
    text = "find the largest batch that fits in memory"
    add = _parser(commands, "max-batch", _max_batch, text, _DATA_TEXT)
    limit = "memory that may be taken, such as 2GiB (what the GPU has; half of a host's)"
    add("--limit", dest="memory_limit_bytes", type=memory_size, metavar="SIZE", help=limit)
    window = {"dest": "memory_window", "type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    add("--window", **window, help="share of the limit to fill (0.8 0.9)")
    add("--max", dest="max_batch_size", type=int, metavar="N", help="largest batch to try")
    training = {"dest": "training", "action": "store_false"}
    add("--inference", **training, help="run predictions instead of train steps")
    policy = "Keras dtype policy to build under, such as mixed_float16"
    add("--policy", default=None, metavar="NAME", help=policy)
    add("-o", "--output", type=Path, default=None, metavar="FILE", help="write the record")


def _max_batch(options: argparse.Namespace) -> None:
    given = _given(options, "policy")
    with starting_tensorflow():
        from kbatch.memory.find import find_max_batch_size
        from kbatch.training.dtype_policy import check_dtype_policies, dtype_policy_scope
    build, (x, y) = named_build(options.build), named_x_y(options.data)
    policy = options.policy and check_dtype_policies(options.policy)[0]
    with dtype_policy_scope(policy) if policy else contextlib.nullcontext():
        _write(find_max_batch_size(build, x, y, **given), options.output)


def add_recommend(commands: Any) -> None:
    text = "name a size to start with, by its limits"
    add = _parser(commands, "recommend", _recommend, text, _DATA_TEXT)
    base = "batch size that the model's learning rate suits (%(default)s)"
    add("--base-batch-size", type=int, default=BASE_BATCH_SIZE, metavar="N", help=base)
    limit = "memory that may be taken, such as 2GiB (as in max-batch)"
    add("--limit", dest="memory_limit_bytes", type=memory_size, metavar="SIZE", help=limit)
    seconds = {"dest": "budget_s", "type": float, "default": BUDGET_S, "metavar": "SECONDS"}
    add("--budget", **seconds, help="seconds to spend on measuring (%(default)s)")
    add("--seed", type=int, metavar="N", help="seed of the pilot")
    add("-o", "--output", type=Path, default=None, metavar="FILE", help="write the record")
    figure = "write the figure of the limits"
    add("--figure", type=Path, default=None, metavar="FILE", help=figure)


def _recommend(options: argparse.Namespace) -> None:
    given = _given(options, "figure")
    if options.figure is not None and options.figure.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--figure` must end in .png, .svg or .pdf. Received: --figure {options.figure}."
        )
    with starting_tensorflow():
        from kbatch.recommendation.measure import recommend

    (x, y), build = named_x_y(options.data), named_build(options.build)
    given["on_progress"] = lambda line: print(f"measuring {line} ...", flush=True)
    found = recommend(build, x, y, **given)
    print()
    _write(found, options.output, *([(options.figure, found.plot)] if options.figure else []))
