"""What the name of a metric says: which direction is better, and whether its values are fractions.

Names are compared whole, never by a part of a word: `val_accumulated_cost` is no accuracy. Before
that, what Keras adds to a name is taken off: `val_`, `weighted_`, the name of the output, and the
number of a second metric of a kind, as in `val_topic_accuracy_1`. Records store the direction, so
that a study is read without TensorFlow.
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
# Others between 0 and 1, of which more is better.
_FRACTIONS = """
auc precision recall precision_at_recall recall_at_precision sensitivity_at_specificity
specificity_at_sensitivity f1 f1_score f_beta_score iou mean_iou binary_iou one_hot_iou
one_hot_mean_iou
"""
_LARGER_IS_BETTER = """
samples_per_second true_positives true_negatives cosine_similarity concordance_correlation
pearson_correlation r2_score
"""
# "dice" is not among them: it is a loss in Keras, and a score elsewhere.
_SMALLER_IS_BETTER = """
loss error crossentropy ce binary_crossentropy bce categorical_crossentropy
sparse_categorical_crossentropy binary_focal_crossentropy categorical_focal_crossentropy
categorical_generalized_cross_entropy perplexity mean_absolute_error mae mean_squared_error mse
root_mean_squared_error rmse mean_absolute_percentage_error mape mean_squared_logarithmic_error msle
huber log_cosh log_cosh_error hinge squared_hinge categorical_hinge kl_divergence poisson tversky
circle ctc false_positives false_negatives seconds_to_target
"""
# Before the name of a metric, what turns its direction.
_NEGATED = ("neg", "negative", "minus", "inverse")


def _written_together(names: str) -> set[str]:
    # "mean_iou", "mean_io_u" and "MeanIoU" are one metric.
    return {name.replace("_", "") for name in names.split()}


_ACCURATE = _written_together(_ACCURACIES)
_UP_TO_ONE = _ACCURATE | _written_together(_FRACTIONS)
_MAX = _UP_TO_ONE | _written_together(_LARGER_IS_BETTER)
_MIN = _written_together(_SMALLER_IS_BETTER)


def _kind_of(metric: str) -> str | None:
    """Return the known metric that a name stands for, written together; None if it is none."""
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
    """Return whether more or less of a metric is better; None if its name does not say so."""
    kind = _kind_of(metric)
    return None if kind is None else "max" if kind in _MAX else "min"


def required_direction(metric: str, *, remedy: str, received: str) -> Direction:
    """Return the direction of a metric; raise an error if its name does not show it."""
    if (direction := metric_direction(metric)) is not None:
        return direction
    name = metric.removeprefix("val_")
    common = ["accuracy", "loss", "auc", "precision", "recall", "mae", "mse", "mean_absolute_error"]
    near = difflib.get_close_matches(name, common, n=1)
    meant = f"Did you mean {metric.replace(name, near[0])!r}? " if near else ""
    raise InputError(
        f"{meant}The name {metric!r} does not show the direction, that is whether more or less of "
        f'the metric is better, as "val_accuracy" and "val_loss" do: {remedy}. '
        f"Received: {received}."
    )


def is_accuracy(metric: str) -> bool:
    return _kind_of(metric) in _ACCURATE


def is_fraction(metric: str) -> bool:
    """Return whether the values of a metric lie between 0 and 1, by its name."""
    return _kind_of(metric) in _UP_TO_ONE


def metric_words(metric: str) -> str:
    """Spell out a metric's name, such as "validation accuracy" for `val_accuracy`."""
    if metric == "samples_per_second":
        return "throughput"
    words = metric.removeprefix("val_").replace("_", " ")
    if metric == "seconds_to_target":
        return words
    return f"{'validation' if metric.startswith('val_') else 'training'} {words}"
