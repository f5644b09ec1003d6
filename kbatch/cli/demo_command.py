"""`kbatch demo`: a search on handwritten digits."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.cli.trials_in_terminal import LOG_WIDTH, print_decision, print_trials

if TYPE_CHECKING:
    from rich.console import Console

    from kbatch.study.study_record import Study

_DEMO_SIZES = "16,32,64,128,256,512,1024"
_QUICK_SIZES = "32,128,512"


def add_demo(commands: Any) -> None:
    """Adds the command."""
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
        from kbatch.training.policy_speed import float16_slowdown
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
    from kbatch.report.report import write_report
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
