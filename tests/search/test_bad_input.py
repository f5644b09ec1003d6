"""What `BatchSizeHyperModel` refuses, and what it says."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_sizes": ()}, ValueError, "empty"),
        ({"batch_sizes": (0, 8)}, ValueError, r"\[0, 8\]"),
        ({"batch_sizes": (8, 8)}, ValueError, "repeats"),
        ({"batch_sizes": (8.5,)}, TypeError, "integers"),
        ({"batch_sizes": (True,)}, TypeError, r"\[True\]"),
        ({"batch_sizes": (float("nan"),)}, TypeError, r"\[nan\]"),
        ({"batch_sizes": (8, 2**70)}, ValueError, r"at most 2\*\*53"),
        ({"batch_sizes": (np.uint64(2**63),)}, ValueError, r"at most 2\*\*53"),
        (
            {"steps_per_execution": 0},
            ValueError,
            r"`steps_per_execution` must be a positive integer\. ",
        ),
        ({"micro_batch_size": 2**70}, ValueError, r"`micro_batch_size` must be at most 2\*\*53"),
        ({"memory_limit_bytes": 2**70}, ValueError, "memory_limit_bytes"),
        ({"dtype_policy": "float12"}, ValueError, "mixed_float16"),
        ({"dtype_policy": ()}, ValueError, "at least one"),
        ({"learning_rate_scaling": "cubic"}, ValueError, "'linear'"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0"),
        ({"micro_batch_size": "large"}, ValueError, "micro_batch_size='large'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 1.5}, ValueError, "seed=1.5"),
        ({"base_batch_size": 0}, ValueError, "base_batch_size=0"),
        ({"build": 3}, TypeError, "build=3"),
        ({"build": models.mlp()}, TypeError, "not the model itself"),
    ],
)
def test_arguments_are_checked_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        searches.hypermodel(**arguments)


def no_model():
    return None


def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])


def without_optimizer():
    model = uncompiled()
    model.compile(optimizer=None, loss="mse")
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_model, "return model"),
        (uncompiled, "must be compiled"),
        (without_optimizer, "has no optimizer.*optimizer=None"),
    ],
)
def test_a_build_function_is_checked_before_the_search(tmp_path, build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        searches.tuner(tmp_path, searches.hypermodel(build))


def generator():
    yield models.rows(8)


@pytest.mark.parametrize(
    ("data", "fit", "message"),
    [
        ((generator(),), {}, "generator does not allow"),
        (None, {"batch_size": 64}, "batch_size=64 in a trial of 8"),
        (None, {"validation_batch_size": 64}, "validation_batch_size=64 in a trial of 8"),
    ],
)
def test_data_that_cannot_be_rebatched_ends_the_search(tmp_path, data, fit, message):
    with pytest.raises(ValueError, match=message):
        searches.search(tmp_path, searches.hypermodel(), data=data, fit=fit)


@pytest.mark.parametrize(
    "fit",
    [
        {"epochs": 0},
        {"epochs": -1},
        {"epochs": 1.5},
        {"epochs": "3"},
        {"epochs": True},
        {"epochs": 2, "initial_epoch": 2},
        {"steps_per_epoch": 0},
    ],
    ids=str,
)
def test_training_that_would_make_no_update_ends_the_search(tmp_path, fit):
    ((name, value),) = list(fit.items())[-1:]
    with pytest.raises(ValueError, match=rf"`epochs` must be .*Received: .*{name}={value!r}"):
        searches.search(tmp_path, searches.stock(batch_sizes=(8,)), fit=fit)
    assert len(list(tmp_path.glob("search/trial_*"))) == 1


@pytest.mark.parametrize("dtype", [str, object])
def test_labels_that_are_texts_end_the_search(tmp_path, dtype):
    x, y = models.rows(94)
    y = np.array(["a", "b", "c"], dtype)[y]
    with pytest.raises(ValueError, match=r"np\.unique\(y, return_inverse=True\)\[1\].*dtype"):
        searches.search(tmp_path, searches.stock(), data=(x, y))


@pytest.mark.parametrize("place", ["file", "file/below", "project"])
def test_a_file_where_the_folder_shall_be_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "search").write_text("")
    directory = tmp_path if place == "project" else tmp_path / place
    with pytest.raises(ValueError, match=r"`directory` must be a folder.*Received: directory="):
        searches.tuner(directory, searches.stock(), kbatch.BatchSizeTuner)


def test_a_folder_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"`directory` must be .*directory='/proc/nothing'"):
        searches.tuner("/proc/nothing", searches.stock(), kbatch.BatchSizeTuner)


@pytest.mark.parametrize("verbose", ["loud", 3, None])
def test_how_much_is_shown_is_checked(tmp_path, verbose):
    tuner = searches.tuner(tmp_path, searches.stock(), kbatch.BatchSizeTuner)
    with pytest.raises(ValueError, match=rf"`verbose` must be .*verbose={verbose!r}"):
        tuner.search(*models.rows(94), verbose=verbose)


def test_a_batch_larger_than_the_training_set_ends_the_search_at_once(tmp_path):
    hypermodel = searches.hypermodel(batch_sizes=(8, 32, 128))
    with pytest.raises(ValueError, match="batch_size=128 for 94"):
        searches.search(tmp_path, hypermodel)
    assert not list(tmp_path.glob("search/trial_0001"))


@pytest.mark.parametrize("batched", [False, True])
def test_so_does_one_larger_than_a_dataset(tmp_path, batched):
    data = tf.data.Dataset.from_tensor_slices(models.rows(90))
    hypermodel = searches.hypermodel(batch_sizes=(8, 32, 128))
    with pytest.raises(ValueError, match="batch_size=128 for 90"):
        searches.search(tmp_path, hypermodel, data=(data.batch(10) if batched else data,))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The directory of a search of one trial that keras-tuner has begun."""
    directory = tmp_path_factory.mktemp("begun")
    searches.search(directory, searches.stock(), keras_tuner.RandomSearch, max_trials=1)
    return directory


def test_another_search_space_in_the_directory_is_refused(begun):
    other = searches.stock(batch_sizes=(8, 64))
    with pytest.raises(ValueError, match="another `project_name`"):
        searches.search(begun, other, keras_tuner.RandomSearch, max_trials=3)


def test_other_settings_in_the_directory_are_refused_and_named(begun):
    other = searches.stock(learning_rate_scaling="linear")
    with pytest.raises(ValueError, match="learning_rate_scaling: sqrt there, linear here"):
        searches.search(begun, other, keras_tuner.RandomSearch, max_trials=3)


def test_a_directory_that_cannot_be_written_ends_the_search(tmp_path):
    tuner = searches.tuner(tmp_path, searches.hypermodel())
    (tmp_path / "search" / "kbatch.json").mkdir()
    with pytest.raises((OSError, ValueError), match=r"kbatch\.json"):
        tuner.search(*models.rows(94), validation_data=models.rows(40), verbose=0)


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (tf.data.Dataset.from_tensor_slices(models.rows(20)).batch(4).filter(lambda *_: True), 20),
        (lambda size: tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(50), 50),
    ],
)
def test_batches_that_arrive_in_another_size_end_the_search(tmp_path, data, seen):
    hypermodel = searches.stock(batch_sizes=(32,))
    with pytest.raises(ValueError, match=f"{seen} examples: .*batch_size=32"):
        searches.search(tmp_path, hypermodel, data=(data,))


def test_a_finished_search_with_other_settings_is_not_taken_for_the_new_one(tmp_path):
    searches.search(tmp_path, searches.stock(batch_sizes=(8,)))
    again = searches.search(tmp_path, searches.stock(batch_sizes=(8,), seed=1))
    with pytest.raises(ValueError, match=r"overwrite=True.*seed: 0 there, 1 here"):
        kbatch.load_study(again)
    assert len(kbatch.load_study(tmp_path / "search").trials) == 1


def test_no_training_data_ends_the_search(tmp_path):
    with pytest.raises(ValueError, match="`x` is missing"):
        searches.search(tmp_path, searches.hypermodel(), data=())


def test_data_without_end_needs_steps_per_epoch(tmp_path):
    endless = tf.data.Dataset.from_tensor_slices(models.rows(94)).repeat()
    with pytest.raises(ValueError, match="steps_per_epoch"):
        searches.search(tmp_path, searches.stock(), data=(endless,))
    tuner = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(8,)),
        data=(endless,),
        fit={"steps_per_epoch": 4},
        project_name="steps",
    )
    assert kbatch.load_study(tuner).trials[0].executions[0].examples_seen == 2 * 4 * 8


@pytest.mark.parametrize(
    ("fit", "objective"), [({"validation_data": None}, "val_accuracy"), ({}, "val_auc")]
)
def test_an_objective_that_is_no_metric_ends_the_search_after_an_epoch(tmp_path, fit, objective):
    objective = keras_tuner.Objective(objective, "max")
    with pytest.raises(ValueError, match=rf"{objective.name}.*metrics \['accuracy'.*'loss'"):
        searches.search(tmp_path, searches.stock(), fit=fit, objective=objective)
    assert not list(tmp_path.glob("search/trial_0001"))


def test_a_class_instead_of_an_instance_is_refused():
    class Mine(keras_tuner.HyperModel):
        pass

    with pytest.raises(TypeError, match=r"give `Mine\(\)`"):
        searches.hypermodel(Mine)


def test_throughput_as_objective_needs_steps_to_measure(tmp_path):
    objective = keras_tuner.Objective("samples_per_second", "max")
    hypermodel = searches.stock(batch_sizes=(94,))
    tuner = searches.search(tmp_path, hypermodel, objective=objective, fit={"epochs": 1})
    (trial,) = kbatch.load_study(tuner).trials
    assert trial.status == "failed"
    assert "too few steps to measure samples/s" in trial.failure
