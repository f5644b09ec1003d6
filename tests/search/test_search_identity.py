"""A search continues in a directory only if the directory holds the same search."""

import os
import signal

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.search.files import search_lock
from kbatch.search.identity import fit_facts, model_facts
from kbatch.training.data.training_data import FitCall
from kbatch.training.dtype_policy import dtype_policy_scope

EarlyStopping = keras.callbacks.EarlyStopping


def wide():
    """Has another layer than `models.stock`."""
    return models.mlp(inner=[keras.layers.Dense(24)], optimizer="sgd", loss=models.own_loss)


def rated(hp):
    """Tunes the learning rate."""
    return models.stock(optimizer=keras.optimizers.SGD(hp.Choice("rate", [0.1, 0.2])))


def by_size(hp):
    return models.stock(optimizer=keras.optimizers.SGD(0.001 * hp.get("batch_size")))


def hypermodel(build=models.stock, batch_sizes=(8,), **arguments):
    return searches.stock(build, batch_sizes, **({"base_batch_size": None} | arguments))


def search(directory, build=models.stock, *, fit=None, sizes=(8,), model=None, **arguments):
    kind = arguments.pop("kind", kbatch.BatchSizeTuner)
    tuned = hypermodel(build, sizes, **(model or {}))
    return searches.quick(directory, tuned, kind, fit=fit, **arguments)


@pytest.fixture(scope="module")
def ended_search(tmp_path_factory):
    """The directory of a finished search of one trial."""
    directory = tmp_path_factory.mktemp("ended")
    again(directory)
    return directory


def again(directory, **changed):
    fit = {
        "callbacks": [EarlyStopping(monitor="loss", patience=3)],
        "validation_data": models.rows(40, seed=1),
    } | changed.pop("fit", {})
    return search(directory, fit=fit, **changed)


class Counts(keras.callbacks.Callback):
    """Writes a line to a file in each training."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_begin(self, logs=None):
        with self.file.open("a") as lines:
            lines.write("begun\n")


DIFFERENCES = {
    "architecture": ({"build": wide}, "Sequential of 2 layers .* then, Sequential of 3 layers"),
    "optimizer": ({"build": lambda: models.stock(optimizer="adam")}, "optimizer: SGD then, Adam"),
    "other values": ({"data": models.rows(94, seed=3)}, r"x: 94 rows of \(8,\) float32, values"),
    "epochs": ({"fit": {"epochs": 3}}, r"Received: epochs: 1 then, 3 now\.$"),
    "patience": (
        {"fit": {"callbacks": [EarlyStopping(monitor="loss", patience=9)]}},
        r"callback EarlyStopping: .*'patience': 3.* then, .*'patience': 9.* now",
    ),
    "validation": (
        {"fit": {"validation_data": models.rows(30, seed=1)}},
        r"validation_data: \['40 rows .* then, \['30 rows .* now",
    ),
    "settings, model and a drawn seed": (
        {"sizes": (16,), "build": wide, "model": {"seed": None}},
        r"Received: batch_sizes: \[8\] then, \[16\] now; base_batch_size: [^;]*; model: Seq",
    ),
    "hyperparameter": ({"build": rated}, r"hyperparameter 'rate': none then, .*0\.1"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_search_refuses_other_search_and_names_difference(ended_search, difference):
    changed, message = DIFFERENCES[difference]
    with pytest.raises(ValueError, match=message) as error:
        again(ended_search, **changed)
    assert "`project_name`" in str(error.value)
    assert "overwrite=True" in str(error.value)
    assert len(kbatch.load_study(ended_search / "search").trials) == 1


def test_search_refuses_second_process_until_first_ends(tmp_path):
    project = tmp_path / "search"
    project.mkdir()
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        with search_lock(project):
            os.write(writer, b"held")
            signal.pause()
    try:
        assert os.read(reader, 4) == b"held"
        for arguments in ({}, {"overwrite": True}):
            with pytest.raises(ValueError, match=rf"{project}.*process {holder} uses"):
                search(tmp_path, **arguments)
        assert list(project.iterdir()) == [project / "kbatch.lock"]
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert len(kbatch.load_study(search(tmp_path)).trials) == 1


def test_search_continues_with_more_sizes_and_executions(tmp_path):
    counts = Counts(tmp_path / "begun")
    fit = {"callbacks": [counts]}
    # The build function reads the batch size.
    search(tmp_path, by_size, sizes=(16,), fit=fit)
    (old,) = kbatch.load_study(tmp_path / "search").trials
    tuner = search(tmp_path, by_size, sizes=(8, 16, 32), fit=fit, executions_per_trial=2)
    study = kbatch.load_study(tuner)
    assert [trial.batch_size for trial in study.trials] == [8, 16, 32]
    assert [len(trial.executions) for trial in study.trials] == [2, 2, 2]
    trial_16 = next(trial for trial in study.trials if trial.batch_size == 16)
    assert trial_16.trial_id == old.trial_id
    assert trial_16.executions[0] == old.executions[0]
    assert counts.file.read_text().count("begun") == 1 + 5
    # These settings of the first search stay, because its trials depend on them.
    assert study.search.settings["base_batch_size"] == 16
    assert study.search.settings["validation_batch_size"] == 16
    assert study.search.settings["batch_sizes"] == [8, 16, 32]
    assert study.search.settings["executions_asked"] == [1, 2]
    tuner.get_best_models()
    begun = counts.file.read_text()
    search(tmp_path, by_size, sizes=(8, 16, 32), fit=fit, executions_per_trial=2)
    assert counts.file.read_text() == begun
    assert kbatch.load_study(tuner).search.settings["executions_asked"] == [1, 2]


def test_keras_tuner_search_refuses_other_settings_but_not_epochs(tmp_path):
    arguments = {"kind": keras_tuner.RandomSearch, "sizes": (8, 16)}
    search(tmp_path, max_trials=1, **arguments)
    with pytest.raises(ValueError, match="seed: 0 then, 1 now"):
        search(tmp_path, max_trials=2, model={"seed": 1}, **arguments)
    assert len(kbatch.load_study(tmp_path / "search").trials) == 1
    # Trials may train for different numbers of epochs.
    study = kbatch.load_study(search(tmp_path, max_trials=2, fit={"epochs": 2}, **arguments))
    assert [trial.status for trial in study.trials] == ["completed", "completed"]


def facts(**arguments):
    return fit_facts(FitCall((), arguments))


def test_fit_facts_of_large_array_compare_some_rows(tmp_path):
    x = np.zeros((400_000, 16), "float32")
    same, other = x.copy(), x.copy()
    other[-1] = 1
    assert facts(x=x) == facts(x=same.astype("float64")) != facts(x=other)


def test_fit_facts_compare_values_of_arguments():
    assert facts(class_weight={0: 1, 1: 2}) == facts(class_weight={1: 2, 0: 1})
    assert facts(x={"name": np.zeros(3)}) != facts(x={"name": np.ones(3)})
    assert facts(epochs=np.array(3)) == facts(epochs=np.int64(3)) != facts(epochs=np.array(4))
    one, two = (EarlyStopping(baseline=tf.constant(n, tf.bfloat16)) for n in (1.0, 2.0))
    assert facts(callbacks=[one]) != facts(callbacks=[two])
    assert facts(callbacks=[keras.callbacks.History(), keras.callbacks.ProgbarLogger()]) == facts()


def test_model_facts_without_policy_are_equal_for_all_policies():
    facts = []
    for policy in ("float32", "mixed_float16"):
        with dtype_policy_scope(policy):
            facts.append(model_facts(models.mlp(), with_policy=False))
    assert facts[0] == facts[1]
