"""The commands that measure: `inference`, `input`, `max-batch` and `recommend`."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from kbatch.cli.arguments import (
    add_model_arguments,
    check_model_arguments,
    integers,
    memory_size,
    milliseconds,
    named_build,
    named_data,
    named_x_y,
    starting_tensorflow,
)
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.recommendation import BUDGET_S
from kbatch.search import BASE_BATCH_SIZE

_DATA_TEXT = "function that returns (x, y) or a dataset, or takes a batch size and does so"


def _write(result: Any, record: Path | None, *figures: tuple[Path, Any]) -> None:
    """Print a result, and write its record and its figures where they are wanted."""
    from kbatch.plotting.saving import save_figure

    print(result)
    if record is not None:
        result.save(record)
        print(f"record: {record}")
    for path, draw in figures:
        save_figure(draw(None), path)
        print(f"figure: {path}")


def add_inference(commands: Any) -> None:
    parser = commands.add_parser(
        "inference", help="measure latency, throughput and memory of predictions by batch size"
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a saved model, .keras or .h5")
    add("--slo", metavar="TIME", help="latency target, such as 20ms: find the largest batch in it")
    share = "share of the calls that keep to it (%(default)s)"
    add("--quantile", type=float, default=0.95, metavar="Q", help=share)
    paths = "compiled, xla, predict_on_batch, call, predict, saved_model (%(default)s)"
    add("--paths", default="compiled", metavar="NAME,...", help=paths)
    add("--policies", metavar="NAME,...", help="dtype policies and int8 (the model as it is)")
    add("--batch-sizes", metavar="N,N,...", help="sizes (powers of two)")
    seconds = "time budget of the timing (%(default)s)"
    add("--seconds", type=float, default=TIME_BUDGET_S, metavar="S", help=seconds)
    bulk = "examples of a call of predict, which runs no larger batches (%(default)s)"
    add("--bulk-examples", type=int, default=BULK_EXAMPLES, metavar="N", help=bulk)
    add("--no-memory", action="store_true", help="leave the memory out")
    output = {"type": Path, "default": Path("kbatch-inference"), "metavar": "DIR"}
    add("-o", "--output", **output, help="where profile, table and figures go (%(default)s)")
    parser.set_defaults(run=_inference)


def _inference(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape

    target_ms = None if options.slo is None else milliseconds(options.slo)
    sizes = options.batch_sizes and integers(options.batch_sizes, example="1,8,64")
    if not options.model.exists():
        raise ValueError(
            "MODEL must be a file that `model.save` wrote, .keras or .h5: it does not exist. "
            f"Received: {options.model}."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    with starting_tensorflow():
        from kbatch.inference.inputs import load_saved_model
        from kbatch.inference.measure import profile_inference

    model = load_saved_model(options.model)
    with Console(emoji=False).status("measuring") as status:
        profile = profile_inference(
            model,
            batch_sizes=sizes,
            call_paths=_words(options.paths),
            dtype_policies=None if options.policies is None else _words(options.policies),
            latency_slo_ms=target_ms,
            quantile=options.quantile,
            time_budget_s=options.seconds,
            measure_memory=not options.no_memory,
            bulk_examples=options.bulk_examples,
            on_progress=lambda line: status.update(escape(line)),
        )
    profile.table().to_csv(options.output / "profile.csv", index=False)
    figures = ((options.output / f"{figure.name}.png", figure.draw) for figure in profile.figures())
    _write(profile, options.output / "profile.json", *figures)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def add_input(commands: Any) -> None:
    parser = commands.add_parser("input", help="find out whether the data is the bottleneck")
    add_model_arguments(parser, data="dataset, PyDataset or arrays, or a function that makes them")
    add = parser.add_argument
    add("--batch-size", type=int, metavar="N", help="examples in a batch (those of the dataset)")
    add("--budget", type=float, metavar="SECONDS", help="seconds to spend on measuring")
    add("--no-remedies", action="store_true", help="leave out the changes to the pipeline")
    cache = "memory that a cache may take when tried"
    add("--cache-bytes", type=int, metavar="BYTES", help=cache)
    output = {"type": Path, "default": Path("kbatch-input"), "metavar": "DIR"}
    add("-o", "--output", **output, help="where record and figure go (%(default)s)")
    parser.set_defaults(run=_input)


def _input(options: argparse.Namespace) -> None:
    check_model_arguments(options)
    with starting_tensorflow():
        from kbatch.input_pipeline.measure import profile_input_pipeline

    build, data = named_build(options.build), named_data(options.data)
    given = {"budget_s": options.budget, "cache_bytes": options.cache_bytes}
    budgets = {name: value for name, value in given.items() if value is not None}
    profile = profile_input_pipeline(
        build, data, batch_size=options.batch_size, remedies=not options.no_remedies, **budgets
    )
    _write(profile, options.output / "input.json", (options.output / "input.png", profile.plot))


def add_max_batch(commands: Any) -> None:
    parser = commands.add_parser("max-batch", help="find the largest batch that fits in memory")
    add_model_arguments(parser, data=_DATA_TEXT)
    add = parser.add_argument
    limit = "memory that may be taken, such as 2GiB (what the GPU has; half of a host's)"
    add("--limit", metavar="SIZE", help=limit)
    window = {"type": float, "nargs": 2, "default": (0.80, 0.90), "metavar": ("LOW", "HIGH")}
    add("--window", **window, help="share of the limit to fill (0.8 0.9)")
    add("--max", type=int, metavar="N", help="largest batch to try")
    add("--inference", action="store_true", help="run predictions instead of train steps")
    policy = "Keras dtype policy to build under, such as mixed_float16"
    add("--policy", metavar="NAME", help=policy)
    add("-o", "--output", type=Path, metavar="FILE", help="write the record")
    parser.set_defaults(run=_max_batch)


def _max_batch(options: argparse.Namespace) -> None:
    check_model_arguments(options)
    limit_bytes = options.limit and memory_size(options.limit)
    with starting_tensorflow():
        from kbatch.memory.find import find_max_batch_size
        from kbatch.training.dtype_policy import check_dtype_policies, dtype_policy_scope
    build = named_build(options.build)
    x, y = named_x_y(options.data)
    policy = options.policy and check_dtype_policies(options.policy)[0]
    with dtype_policy_scope(policy) if policy else contextlib.nullcontext():
        result = find_max_batch_size(
            build,
            x,
            y,
            memory_window=tuple(options.window),
            memory_limit_bytes=limit_bytes,
            max_batch_size=options.max,
            training=not options.inference,
        )
    _write(result, options.output)


def add_recommend(commands: Any) -> None:
    parser = commands.add_parser("recommend", help="name a size to start with, by its limits")
    add_model_arguments(parser, data=_DATA_TEXT)
    add = parser.add_argument
    base = "batch size that the model's learning rate suits (%(default)s)"
    add("--base-batch-size", type=int, default=BASE_BATCH_SIZE, metavar="N", help=base)
    limit = "memory that may be taken, such as 2GiB (as in max-batch)"
    add("--limit", metavar="SIZE", help=limit)
    budget = "seconds to spend on measuring (%(default)s)"
    add("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help=budget)
    add("--seed", type=int, metavar="N", help="seed of the pilot")
    add("-o", "--output", type=Path, metavar="FILE", help="write the record")
    add("--figure", type=Path, metavar="FILE", help="write the figure of the limits")
    parser.set_defaults(run=_recommend)


def _recommend(options: argparse.Namespace) -> None:
    check_model_arguments(options)
    limit_bytes = options.limit and memory_size(options.limit)
    if options.figure is not None and options.figure.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--figure` must end in .png, .svg or .pdf. Received: --figure {options.figure}."
        )
    with starting_tensorflow():
        from kbatch.recommendation.measure import recommend

    x, y = named_x_y(options.data)
    found = recommend(
        named_build(options.build),
        x,
        y,
        base_batch_size=options.base_batch_size,
        memory_limit_bytes=limit_bytes,
        budget_s=options.budget,
        seed=options.seed,
        on_progress=lambda line: print(f"measuring {line} ...", flush=True),
    )
    print()
    _write(found, options.output, *([(options.figure, found.plot)] if options.figure else []))
