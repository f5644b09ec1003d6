"""Read recorded trainings, on which searches are replayed.

python benchmarks/tables.py    lists the tables

A table is one task by one metric: every batch size, learning rate and seed of it was trained once
(`decision_tables.py`), with the metric after each epoch. Searches are drawn from every third seed,
or from every second of fewer than twelve. The others tell the truth, so no search sees the seeds
that it is judged by. Half of the tables are held back: no design or constant may be chosen by them.

A file benchmarks/tables/NAME.npz holds, over [size, rate, seed, ...]:

curve       metric over the validation examples after each epoch; NaN if an output is not finite,
            or if the outputs are the same for all examples
test        the same over the test examples
outcomes    mean metric of each block of validation examples over the judged epochs: the best
            fifth, at least two, by the validation examples
error       in place of `outcomes` if the metric is no mean over examples: standard error of the
            judged value over validation examples
seeds       the number of each seed
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

TABLES = Path(__file__).parent / "tables"
SIZES = (16, 32, 64, 128, 256, 512)
BASE_SIZE = 32
FACTORS = tuple(2.0**octave for octave in range(-6, 7))  # Of the rule's rate.
BLOCKS = 50  # Blocks of validation examples.
TRAINING, VALIDATION = 2048, 1500

DEVELOPMENT = ("mlp", "cnn", "text", "mlp_loss", "noisy_table")
HELD_BACK = ("cnn_loss", "text_loss", "noisy_digits", "attention", "resnet", "rare_digit")
# Seconds of an update and of an example: least times of Keras's training function on two cores.
COSTS = {"mlp": (1.8e-3, 0.9e-6), "cnn": (3.0e-3, 22e-6), "text": (18e-3, 75e-6)}
COSTS |= {"attention": (1.6e-3, 13e-6), "resnet": (2.2e-3, 27e-6)}
# These are small dense nets as well and were not timed.
COSTS |= dict.fromkeys(("noisy_table", "noisy_digits", "rare_digit"), COSTS["mlp"])


class Table(NamedTuple):
    """The trainings of a task by one metric.

    Attributes:
        name: Name of the table.
        held_back: Whether it is used only at the end.
        larger_is_better: Direction of the metric.
        epochs: Epochs of a complete training.
        examples: Validation examples.
        curve: Metric after each epoch of the runs that searches draw, [size, rate, seed, epoch].
            NaN if the net is dead: an output is not finite, or all examples have the same.
        outcomes: Metric of each block of validation examples, mean over the judged epochs, [size,
            rate, seed, block]. None if the metric is no mean over examples.
        standard_error: Of the judged value of one run, over validation examples: the median over
            the runs of the ten best pairs.
        tested: Judged test metric of the other seeds, [size, rate, seed]. A run that ends dead
            counts as the worst one that does not.
        truth: Its mean over these seeds, [size, rate].
        seconds: Seconds of a complete training of each size, with its validation.
        tolerances: Tolerances that are replayed, in the metric's unit: 0.01 and 0.02, or 2 % of the
            best loss.
        short_runs: Whether the first epochs of a run are the same as a short run. They are not if
            the learning rate decays until the end of the training.
    """

    name: str
    held_back: bool
    larger_is_better: bool
    epochs: int
    examples: int
    curve: np.ndarray
    outcomes: np.ndarray | None
    standard_error: float
    tested: np.ndarray
    truth: np.ndarray
    seconds: np.ndarray
    tolerances: tuple[float, ...]
    short_runs: bool


def read_tables(*, held_back: bool | None = None) -> dict[str, Table]:
    """Read the tables: those held back, the others, or if None, all."""
    names = {None: DEVELOPMENT + HELD_BACK, False: DEVELOPMENT, True: HELD_BACK}[held_back]
    return {name: read_table(name) for name in names if (TABLES / f"{name}.npz").exists()}


def read_table(name: str) -> Table:
    stored = {
        key: values.astype("float64") for key, values in np.load(TABLES / f"{name}.npz").items()
    }
    by_loss = name.endswith("_loss")
    sign = -1 if by_loss else 1
    seeds = stored["seeds"].argsort()
    search = seeds[:: 3 if len(seeds) >= 12 else 2]
    others = np.setdiff1d(seeds, search)
    curve, tested = stored["curve"], judged(stored["curve"], stored["test"], sign)
    tested = np.where(np.isnan(curve[..., -1]), np.nan, tested)
    tested = np.where(np.isnan(tested), sign * np.nanmin(sign * tested), tested)[..., others]
    truth = tested.mean(2)
    best = np.unravel_index((-sign * truth).ravel().argsort()[:10], truth.shape)
    if "outcomes" in stored:
        outcomes = stored["outcomes"][:, :, search]
        errors = outcomes.std(3, ddof=1) / BLOCKS**0.5
    else:
        outcomes, errors = None, stored["error"][:, :, search]
    epochs = curve.shape[3]
    task = name.removesuffix("_loss")
    update_s, example_s = COSTS[task]
    step_s = update_s / np.array(SIZES) + example_s
    return Table(
        name,
        name in HELD_BACK,
        not by_loss,
        epochs,
        VALIDATION,
        curve[:, :, search],
        outcomes,
        float(np.median(errors[best])),
        tested,
        truth,
        # An example takes about a third of its time in a step to validate.
        epochs * (TRAINING + VALIDATION / 3) * step_s,
        (0.02 * truth.min(),) if by_loss else (0.01, 0.02),
        task != "resnet",
    )


def judged(curve: np.ndarray, values: np.ndarray, sign: int) -> np.ndarray:
    """Return the mean of values over the judged epochs of curves, [..., epoch]."""
    return np.take_along_axis(values, judged_epochs(sign * curve), -1).mean(-1)


def judged_epochs(curve: np.ndarray) -> np.ndarray:
    """Return the best fifth of the epochs, at least two, [..., epoch]; larger is better."""
    count = max(2, round(curve.shape[-1] / 5))
    known = np.where(np.isnan(curve), -np.inf, curve)
    return np.argsort(-known, -1, kind="stable")[..., :count]


def main() -> None:
    print(
        f"{'':14}{'held back':>10}{'seeds':>9}{'epochs':>7}{'best':>8}{'tolerance':>10}"
        f"{'error':>8}{'seed sd':>8}{'truth':>8}  fastest size within each tolerance, at its rate"
    )
    for table in read_tables().values():
        sign = 1 if table.larger_is_better else -1
        truth, best = sign * table.truth, np.unravel_index((sign * table.truth).argmax(), (6, 13))
        deviation = table.tested[best].std(ddof=1)
        counts = f"{table.curve.shape[2]} + {table.tested.shape[2]}"
        print(
            f"{table.name:14}{'yes' if table.held_back else 'no':>10}{counts:>9}"
            f"{table.epochs:7}{table.truth[best]:8.4f}{table.tolerances[0]:10.4f}"
            f"{table.standard_error:8.4f}{deviation:8.4f}"
            f"{deviation / table.tested.shape[2] ** 0.5:8.4f} ",
            *(
                f"{SIZES[size]} at {FACTORS[truth[size].argmax()]:g}"
                for tolerance in table.tolerances
                for size in [np.flatnonzero(truth.max(1) >= truth.max() - tolerance)[-1]]
            ),
        )


if __name__ == "__main__":
    main()
