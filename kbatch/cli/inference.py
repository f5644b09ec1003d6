"""`kbatch inference`: which batch size a saved model should predict with."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.inference.defaults import BULK_EXAMPLES, TIME_BUDGET_S

if TYPE_CHECKING:
    from rich.console import Console

    from kbatch.inference.inference_record import InferenceProfile

_LOG_WIDTH = 120
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_FIGURES = ("throughput", "operating_curve", "paths", "memory", "tails", "noise")


def add_inference(commands: Any) -> None:
    """Adds the command."""
    inference = commands.add_parser(
        "inference", help="measure latency, throughput and memory of predictions by batch size"
    )
    inference.add_argument("model", type=Path, metavar="MODEL", help="a saved model, .keras or .h5")
    inference.add_argument(
        "--slo", metavar="TIME", help="latency target, such as 20ms: find the largest batch in it"
    )
    inference.add_argument(
        "--quantile",
        type=float,
        default=0.95,
        metavar="Q",
        help="share of the calls that keep to it (%(default)s)",
    )
    inference.add_argument(
        "--paths",
        default="compiled",
        metavar="NAME,...",
        help="compiled, xla, predict_on_batch, call, predict, saved_model (%(default)s)",
    )
    inference.add_argument(
        "--policies", metavar="NAME,...", help="dtype policies and int8 (the model as it is)"
    )
    inference.add_argument("--batch-sizes", metavar="N,N,...", help="sizes (powers of two)")
    inference.add_argument(
        "--seconds",
        type=float,
        default=TIME_BUDGET_S,
        metavar="S",
        help="time budget of the timing (%(default)s)",
    )
    inference.add_argument(
        "--bulk-examples",
        type=int,
        default=BULK_EXAMPLES,
        metavar="N",
        help="examples of a call of predict, which runs no larger batches (%(default)s)",
    )
    inference.add_argument("--no-memory", action="store_true", help="leave the memory out")
    inference.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kbatch-inference"),
        metavar="DIR",
        help="where the profile, the table and the figures go (%(default)s)",
    )
    inference.set_defaults(run=_run)


def milliseconds(text: str) -> float:
    """Reads a time with its unit.

    Example:

    >>> milliseconds("20ms"), milliseconds("0.5s")
    (20.0, 500.0)

    Raises:
        ValueError: If it is none.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(
            "`--slo` must be a positive time with its unit, such as 20ms, 500us or 0.1s. "
            f"Received: --slo {text}."
        )
    return float(found[1]) * _UNITS_MS[found[2]]


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape

    from kbatch.device.quiet_start import quiet_start
    from kbatch.inference.inference_text import inference_lines

    target_ms = None if options.slo is None else milliseconds(options.slo)
    sizes = None if options.batch_sizes is None else _integers(options.batch_sizes)
    if not options.model.exists():
        raise ValueError(
            "MODEL must be a file that `model.save` wrote, .keras or .h5: it does not exist. "
            f"Received: {options.model}."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    console.print("Starting TensorFlow ...", highlight=False)
    with quiet_start():
        from kbatch.inference.inference import profile_inference
        from kbatch.inference.saved_keras_model import load_saved_model
    model = load_saved_model(options.model)
    with console.status("measuring") as status:
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
    _print_table(profile, console)
    for line in inference_lines(profile, target_ms):
        console.print(line, highlight=False, markup=False)
    _write(profile, options.output, console)


def _print_table(profile: "InferenceProfile", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from kbatch.inference.inference_rows import inference_rows

    titles, rows = inference_rows(profile)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _write(profile: "InferenceProfile", directory: Path, console: "Console") -> None:
    import importlib

    from kbatch.plotting.saving import save_figure

    profile.save(directory / "profile.json")
    profile.to_dataframe().to_csv(directory / "profile.csv", index=False)
    console.print(f"profile: {directory / 'profile.json'}", highlight=False, soft_wrap=True)
    for name in _FIGURES:
        home = importlib.import_module(f"kbatch.inference.figures.{name}")
        path = directory / f"{name}.png"
        try:
            save_figure(getattr(home, f"plot_inference_{name}")(profile), path)
        except ValueError as error:
            console.print(f"no figure {name}: {error}", highlight=False, markup=False)
            continue
        console.print(f"figure: {path}", highlight=False, soft_wrap=True)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(
            "`--batch-sizes` must be integers with commas between them, such as 1,8,64. "
            f"Received: --batch-sizes {text}."
        ) from error
