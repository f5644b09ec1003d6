"""Throughput of training from the durations of its steps."""

import dataclasses
from collections.abc import Sequence

import numpy as np

SHORTEST_WINDOW_S = 0.05
MOST_WINDOWS = 200


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Examples per second of training after its first steps.

    Attributes:
        mean: All examples over all seconds, in examples per second.
        median: Median over the windows, in examples per second. It shows what most steps do, and
            hides the few that take long.
        low: First quartile over the windows, in examples per second.
        high: Third quartile over the windows, in examples per second.
        windows: How many windows were measured.
    """

    mean: float
    median: float
    low: float
    high: float
    windows: int


def throughput_of_windows(
    examples: Sequence[int], durations_s: Sequence[float]
) -> Throughput | None:
    """Summarises the throughput of several windows of training.

    Args:
        examples: Examples trained on in each window.
        durations_s: Duration of each window, in seconds.

    Returns:
        The throughput, or None when there was no window.
    """
    if not len(examples):
        return None
    rates = np.asarray(examples, float) / np.asarray(durations_s, float)
    low, median, high = np.quantile(rates, [0.25, 0.5, 0.75])
    mean = float(np.sum(examples) / np.sum(durations_s))
    return Throughput(mean, float(median), float(low), float(high), len(rates))


def steady_windows(
    examples: Sequence[int], durations_s: Sequence[float], steady: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """Joins consecutive steady steps into windows of at least 50 ms.

    A timer's resolution and a callback's hiccup weigh little in a window that long. Steps
    left over at the end, the ragged last batch among them, join the last window.

    Args:
        examples: Examples in each step, in order.
        durations_s: Duration of each step, in seconds.
        steady: Whether each step may be counted: not the first one of a shape, which compiled.

    Returns:
        Examples and duration (seconds) of each window.
    """
    counted = [(n, s) for n, s, ok in zip(examples, durations_s, steady, strict=True) if ok]
    shortest = max(SHORTEST_WINDOW_S, sum(s for _, s in counted) / MOST_WINDOWS)
    window_examples: list[int] = []
    window_durations: list[float] = []
    rows, seconds = 0, 0.0
    for n, s in counted:
        rows, seconds = rows + n, seconds + s
        if seconds >= shortest:
            window_examples.append(rows)
            window_durations.append(seconds)
            rows, seconds = 0, 0.0
    if rows and window_examples:
        window_examples[-1] += rows
        window_durations[-1] += seconds
    elif rows:
        window_examples, window_durations = [rows], [seconds]
    return window_examples, window_durations
