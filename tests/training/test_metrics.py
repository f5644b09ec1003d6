"""Directions and ranges of metrics by their names, compared with Keras's own metric objects."""

import inspect

import keras
import keras_tuner
import pytest
import small_models as models

import kbatch
from kbatch.errors import InputError
from kbatch.search.oracle import BatchSizeOracle
from kbatch.study.compared_trials import check_tolerance
from kbatch.training.metrics import is_accuracy, is_fraction, metric_direction

NO_DIRECTION = {"Mean", "MeanMetricWrapper", "Metric", "Sum"}
# In Keras counts have no direction. keras-tuner uses these.
COUNTS = dict.fromkeys(("TruePositives", "TrueNegatives"), "max")
COUNTS |= dict.fromkeys(("FalsePositives", "FalseNegatives"), "min")
REQUIRED = dict.fromkeys(("recall", "precision", "sensitivity", "specificity"), 0.5)
REQUIRED |= {"num_classes": 2, "target_class_ids": [0]}


def made(kind):
    parameters = inspect.signature(kind).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.name in REQUIRED]
    return kind(**{name: REQUIRED[name] for name in needed})


KINDS = {
    name: kind
    for name, kind in vars(keras.metrics).items()
    if isinstance(kind, type) and name not in NO_DIRECTION
}


@pytest.mark.parametrize("kind", KINDS)
def test_metric_direction_equals_keras_metric(kind):
    metric = made(KINDS[kind])
    expected = COUNTS.get(kind) or {"up": "max", "down": "min"}[metric._direction]
    for name in (metric.name, kind, f"val_{metric.name}", f"val_topic_{metric.name}_1"):
        assert metric_direction(name) == expected


def test_metric_direction_of_kbatch_metrics():
    assert metric_direction("seconds_to_target") == "min"
    assert metric_direction("samples_per_second") == "max"


def test_metric_direction_of_losses_is_min():
    names = [name for name, loss in vars(keras.losses).items() if inspect.isfunction(loss)]
    losses = {*names} - {"get", "serialize", "deserialize", "cosine_similarity", "dice"}
    assert len(losses) > 15
    assert {name for name in losses if metric_direction(name) != "min"} == set()


NAMES = {
    "val_mae": "min",
    "val_acc": "max",
    "val_long_topic_loss": "min",
    "weighted_accuracy": "max",
    "val_top_5_accuracy": "max",
    "val_mean_iou": "max",
    "f1": "max",
}


@pytest.mark.parametrize("name", NAMES)
def test_objective_and_target_have_the_same_direction(name):
    assert BatchSizeOracle(name, None).objective.direction == NAMES[name]
    assert kbatch.StopAtTarget(name, 0.3).target.direction == NAMES[name]


@pytest.mark.parametrize(
    "name",
    ["val_accumulated_cost", "val_dice", "val_neg_mae", "val_inverse_accuracy", "sum", "vaccine"],
)
def test_metric_without_direction_is_refused(name):
    assert metric_direction(name) is None
    assert not is_fraction(name)
    with pytest.raises(InputError, match=rf"keras_tuner\.Objective\('{name}', \"max\"\)"):
        BatchSizeOracle(name, None)
    with pytest.raises(InputError, match='mode="max"'):
        kbatch.StopAtTarget(name, 0.3)
    assert kbatch.StopAtTarget(name, 0.3, mode="min").target.direction == "min"


def test_tolerance_of_a_cost_may_exceed_one(tmp_path):
    tuner = kbatch.BatchSizeTuner(
        kbatch.BatchSizeHyperModel(models.stock, (8, 16)),
        keras_tuner.Objective("val_accumulated_cost", "min"),
        strategy="grid",
        tolerance=5,
        directory=tmp_path,
    )
    assert tuner.study_settings["tolerance"] == 5
    for fraction in ("val_accuracy", "val_auc", "val_f1_score"):
        with pytest.raises(ValueError, match="below 1"):
            check_tolerance(5, 0.95, fraction)


def test_is_fraction_for_metrics_between_zero_and_one():
    assert is_fraction("val_auc_1")
    assert not is_accuracy("val_auc_1")
    assert is_accuracy("val_topic_sparse_categorical_accuracy")
    outside = ("val_loss", "r2_score", "cosine_similarity", "true_positives", "samples_per_second")
    assert not any(map(is_fraction, outside))
