"""Keras's metric names in words."""

from kbatch.records.target import COST_NAMES
from kbatch.study.trial import Objective


def metric_words(name: str) -> str:
    """Spells out a metric's name.

    Example:

    >>> metric_words("val_accuracy")
    'validation accuracy'
    """
    validated = name.startswith("val_")
    words = name.removeprefix("val_").replace("_", " ")
    if name == "samples_per_second":
        return "throughput"
    if name in COST_NAMES:
        return words
    return f"validation {words}" if validated else f"training {words}"


def is_fraction(name: str) -> bool:
    """Whether a metric lies between 0 and 1 by its meaning, as an accuracy does."""
    return "acc" in name


def metric_axis_label(metric: Objective) -> str:
    """Labels an axis with a metric, its range or unit, and the direction that is better."""
    words = metric_words(metric.name)
    better = "higher is better" if metric.direction == "max" else "lower is better"
    fraction = "0 to 1, " if is_fraction(metric.name) else ""
    return f"{words[0].upper()}{words[1:]}\n({fraction}{better})"
