"""The oracle: the grid in one order from wherever it goes on, and the best of its trials."""

import random

import keras
import keras_tuner
import pytest
from keras_tuner.src.engine.trial import Trial, TrialStatus
from records_factory import make_execution, make_study, make_trial

from kbatch.search.oracle import BatchSizeOracle, grid, trial_result, untried_in_grid
from kbatch.study.trial import Objective


def plain():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16, 32])
    space.Choice("units", [4, 2, 8], default=2)
    space.Boolean("bias")
    space.Fixed("depth", 3)
    return space


def conditional():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16])
    space.Choice("kind", ["mlp", "cnn"])
    with space.conditional_scope("kind", ["cnn"]):
        space.Int("filters", 4, 12, step=4)
    with space.conditional_scope("kind", ["mlp"]):
        space.Float("rate", 0.1, 0.3, step=0.1)
    return space


@pytest.mark.parametrize("space", [plain, conditional])
def test_the_order_is_that_of_keras_tuners_grid_search_from_wherever_it_goes_on(space):
    oracle = keras_tuner.oracles.GridSearchOracle(
        keras_tuner.Objective("loss", "min"), hyperparameters=space()
    )
    oracle._save_trial = oracle.save = lambda *_: None
    oracle.verbose = 0
    found = []
    while (trial := oracle.create_trial("one")).status != TrialStatus.STOPPED:
        found.append(trial.hyperparameters.values)
        oracle.update_trial(trial.trial_id, {"loss": 0.0})
        trial.status = TrialStatus.COMPLETED
        oracle.end_trial(trial)
    assert list(grid(space())) == found
    for ended in range(len(found) + 1):
        assert list(untried_in_grid(space(), found[:ended])) == found[ended:]


def test_a_hyperparameter_found_later_counts_as_its_default_in_the_trials_before():
    space = plain()
    tried = list(grid(space))
    space.Choice("late", ["a", "b"])
    left = list(untried_in_grid(space, tried))
    assert len(left) == len(tried)
    assert {values["late"] for values in left} == {"b"}


def test_a_range_without_a_step_gives_ascending_samples_after_its_default():
    space = keras_tuner.HyperParameters()
    space.Float("rate", 0.0, 1.0)
    found = [values["rate"] for values in grid(space)]
    assert found == sorted(found)
    assert (len(found), type(found[1])) == (11, float)


SIZES = (8, 16, 32, 64)
ACCURACIES = (0.25, 0.5, 0.75)


def searched(records, objective):
    """The oracle of a search whose trials ended as the records say, in the order of their ids."""
    oracle = BatchSizeOracle(keras_tuner.Objective(objective.name, objective.direction), None)
    for record in sorted(records, key=lambda one: one.trial_id):
        space = keras_tuner.HyperParameters()
        space.values = dict(record.hyperparameters)
        trial = oracle.trials[record.trial_id] = Trial(space, record.trial_id)
        result = trial_result(record)
        trial.status = TrialStatus.FAILED
        if isinstance(result, tuple):
            trial.status = TrialStatus.COMPLETED
            metrics, step = result
            for name, value in metrics.items():
                trial.metrics.update(name, value, step=step)
            oracle.score_trial(trial)
    return oracle


def tied_trials(rng, objective):
    """Trials of few sizes with few values of the objective, begun in any order."""
    ids = rng.sample(range(20), rng.randint(1, 8))
    return [
        make_trial(
            size,
            *(
                make_execution(size, accuracies=(rng.choice(ACCURACIES),), status=status)
                for _ in range(rng.randint(1, 2))
            ),
            trial_id=f"{number:04d}",
            objective=objective,
        )
        for number in ids
        for size in [rng.choice(SIZES)]
        for status in [rng.choice(("completed", "completed", "completed", "failed"))]
    ]


@pytest.mark.parametrize(
    "objective", [Objective("val_accuracy", "max"), Objective("val_loss", "min")]
)
def test_oracle_and_study_name_the_same_best_trial(objective):
    rng = random.Random(0)
    tied = 0
    for _ in range(100):
        records = tied_trials(rng, objective)
        best = make_study(*records).best_trial()
        found = searched(records, objective).get_best_trials(1)
        assert [t.trial_id for t in found] == ([] if best is None else [best.trial_id])
        if best is None:
            continue
        equal = [
            r
            for r in records
            if r.status == "completed" and r.objective_value == best.objective_value
        ]
        assert best.batch_size == min(r.batch_size for r in equal)
        tied += len({r.batch_size for r in equal}) > 1
    assert tied > 15  # Else there was nothing to see.


@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ("val_loss", "min"),
        ("val_mean_absolute_error", "min"),
        ("val_one_hot_mean_io_u", "max"),
        ("cosine_similarity", "max"),
    ],
)
def test_the_name_of_a_metric_tells_its_direction(objective, direction):
    assert BatchSizeOracle(objective, None).objective.direction == direction


def test_no_metric_is_built_where_trials_are_kept(monkeypatch, tmp_path):
    """On a GPU its variables would take the memory that isolated trials need."""

    def build(*args, **kwargs):
        raise AssertionError("a metric was built")

    monkeypatch.setattr(keras.metrics, "deserialize", build)
    speed = Objective("samples_per_second", "max")
    expected = {speed.name: "max", "val_accuracy": "max", "val_mean_absolute_error": "min"}
    oracle = searched((), speed)
    oracle._set_project_dir(str(tmp_path), "search")
    trial = oracle.trials["8"] = Trial(keras_tuner.HyperParameters(), "8")
    oracle.update_trial("8", dict.fromkeys(expected, 0.5))
    assert {name: trial.metrics.get_direction(name) for name in expected} == expected
