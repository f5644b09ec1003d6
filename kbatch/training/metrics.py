"""Derive from the name of a metric which direction is better, and whether values are fractions.

kbatch compares complete words, so `val_accumulated_cost` is not an accuracy. It first removes the
parts that Keras adds to a name: `val_`, `weighted_`, the name of the output, and the number of a
second metric of the same kind, as in `val_topic_accuracy_1`. Records store the direction, so that a
study can be read without TensorFlow.
"""

import difflib
import re
from typing import Literal

from kbatch.errors import InputError

Direction = Literal["max", "min"]

_ACCURACIES = """
accuracy acc binary_accuracy categorical_accuracy sparse_categorical_accuracy
top_k_categorical_accuracy sparse_top_k_categorical_accuracy
"""
# Other metrics between 0 and 1. Larger is better.
_FRACTIONS = """
auc precision recall precision_at_recall recall_at_precision sensitivity_at_specificity
specificity_at_sensitivity f1 f1_score f_beta_score iou mean_iou binary_iou one_hot_iou
one_hot_mean_iou
"""
_LARGER_IS_BETTER = """
samples_per_second true_positives true_negatives cosine_similarity concordance_correlation
pearson_correlation r2_score
"""
# "dice" is missing because it is a loss in Keras and a score in other packages.
_SMALLER_IS_BETTER = """
loss error crossentropy ce binary_crossentropy bce categorical_crossentropy
sparse_categorical_crossentropy binary_focal_crossentropy categorical_focal_crossentropy
categorical_generalized_cross_entropy perplexity mean_absolute_error mae mean_squared_error mse
root_mean_squared_error rmse mean_absolute_percentage_error mape mean_squared_logarithmic_error msle
huber log_cosh log_cosh_error hinge squared_hinge categorical_hinge kl_divergence poisson tversky
circle ctc false_positives false_negatives seconds_to_target
"""
# These words before the name of a metric reverse its direction.
_NEGATED = ("neg", "negative", "minus", "inverse")


def _without_underscores(names: str) -> set[str]:
    # "mean_iou", "mean_io_u" and "MeanIoU" are the same metric.
    return {name.replace("_", "") for name in names.split()}


_ACCURATE = _without_underscores(_ACCURACIES)
_UP_TO_ONE = _ACCURATE | _without_underscores(_FRACTIONS)
_MAX = _UP_TO_ONE | _without_underscores(_LARGER_IS_BETTER)
_MIN = _without_underscores(_SMALLER_IS_BETTER)


def _kind_of(metric: str) -> str | None:
    """Return the known metric in a name, without underscores, or None if there is none."""
    name = metric.removeprefix("val_").removeprefix("weighted_")
    words = re.sub(r"_\d+$", "", name).lower().split("_")
    for first, word in enumerate(words):
        kind = "".join(words[first:])
        if kind in _MAX or kind in _MIN:
            return kind
        if word in _NEGATED:
            return None
    return None


def metric_direction(metric: str) -> Direction | None:
    """Return "max" or "min", the better direction of a metric, or None if its name is unknown."""
    kind = _kind_of(metric)
    return None if kind is None else "max" if kind in _MAX else "min"


def required_direction(metric: str, *, remedy: str, received: str) -> Direction:
    """Return the direction of a metric, or raise an error if its name does not show it."""
    if (direction := metric_direction(metric)) is not None:
        return direction
    name = metric.removeprefix("val_")
    common = ["accuracy", "loss", "auc", "precision", "recall", "mae", "mse", "mean_absolute_error"]
    similar = difflib.get_close_matches(name, common, n=1)
    meant = f"Did you mean {metric.replace(name, similar[0])!r}? " if similar else ""
    raise InputError(
        f"{meant}The name {metric!r} does not say whether larger or smaller values are better: "
        f"{remedy}. Received: {received}."
    )


def is_accuracy(metric: str) -> bool:
    return _kind_of(metric) in _ACCURATE


def is_fraction(metric: str) -> bool:
    """Return whether the values of a metric are between 0 and 1, by its name."""
    return _kind_of(metric) in _UP_TO_ONE


def metric_words(metric: str) -> str:
    """Write out the name of a metric: "validation accuracy" for `val_accuracy`."""
    if metric in ("samples_per_second", "seconds_to_target"):
        return "throughput" if metric == "samples_per_second" else "time to the target"
    words = metric.removeprefix("val_").replace("_", " ")
    return f"{'validation' if metric.startswith('val_') else 'training'} {words}"
