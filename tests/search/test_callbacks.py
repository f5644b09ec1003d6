"""Callbacks of a search: files for each run, scalars in TensorBoard, and trackers."""

import contextlib
import functools

import keras
import pytest
import searches
import small_models as models
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import kbatch
from kbatch.memory.workload import Workload
from kbatch.training.data.training_data import TrainingData


def test_callbacks_write_to_a_folder_for_each_run(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "saved" / "{epoch}.weights.h5", save_weights_only=True
    )
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    fit = {"callbacks": [checkpoint, log], "epochs": 1}
    hypermodel = searches.stock(batch_sizes=(8, 32))
    tuner = searches.search(
        tmp_path, hypermodel, kbatch.BatchSizeTuner, fit=fit, executions_per_trial=2
    )
    study = kbatch.load_study(tuner)
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("saved/**/*.h5"))
    assert written == [
        f"saved/000{trial}/execution{run}/1.weights.h5" for trial in (0, 1) for run in (0, 1)
    ]
    model = models.stock()
    for trial in study.trials:
        for number, run in enumerate(trial.executions):
            folder = tmp_path / trial.trial_id / f"execution{number}"
            names, values = (row.split(",") for row in (folder / "log.csv").read_text().split())
            loss = float(dict(zip(names, values, strict=True))["loss"])
            assert loss == pytest.approx(run.epochs[0].metrics["loss"])
            model.load_weights(tmp_path / "saved" / folder.relative_to(tmp_path) / "1.weights.h5")
            result = model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True)
            assert result["accuracy"] == pytest.approx(run.epochs[0].metrics["val_accuracy"])
        assert [note for note in trial.notes if "<trial id>/execution<number>/log.csv" in note]
    notes = {tuple(n for n in trial.notes if n.code == "own_path") for trial in study.trials}
    assert len(notes) == 1  # The notes of all trials are equal.


def events_of(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder):
    """The values of each scalar of a run, one per epoch."""
    events = events_of(folder)
    return {
        tag: [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def hyperparameters(folder):
    """The values that the HParams page shows for a run."""
    data = events_of(folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = plugin_data_pb2.HParamsPluginData.FromString(data).session_start_info.hparams
    return {name: value.number_value for name, value in shown.items()}


@pytest.mark.slow
def test_tensorboard_has_scalars_of_kbatch_for_each_trial(tmp_path):
    logs = tmp_path / "logs"
    hypermodel = searches.hypermodel(batch_sizes=(8, 32), dtype_policy="float32")
    fit = {"callbacks": [keras.callbacks.TensorBoard(str(logs))], "epochs": 3}
    for trial in kbatch.load_study(searches.search(tmp_path, hypermodel, fit=fit)).trials:
        run = logs / trial.trial_id / "execution0"
        found = scalars(run / "kbatch")
        epochs = [epoch.metrics for epoch in trial.executions[0].epochs]
        assert found["batch_size"] == [trial.batch_size] * 3
        assert found["micro_batch_size"] == [8] * 3
        speeds = [one["samples_per_second"] for one in epochs if "samples_per_second" in one]
        assert found["samples_per_second"] == [pytest.approx(speed, rel=1e-6) for speed in speeds]
        assert all(2**24 < value < 2**40 for value in found["host_memory_bytes"])
        ratios = [
            pytest.approx(one["gradient_variance"] / one["gradient_squared_norm"], rel=1e-5)
            for one in epochs
            if min(one.get(f"gradient_{name}") or 0 for name in ("variance", "squared_norm")) > 0
        ]
        assert found.get("noise_scale", []) == ratios
        assert bool(ratios) == (trial.batch_size > 8)  # Only these batches are cut.
        assert hyperparameters(run)["batch_size"] == trial.batch_size
        accuracies = scalars(run / "validation")["epoch_accuracy"]
        assert accuracies == [pytest.approx(one["val_accuracy"]) for one in epochs]


@pytest.fixture
def tracked(monkeypatch):
    """Wrap `fit` as MLflow's autolog does, and list the batch size of each call."""
    plain, found = keras.Model.fit, []

    @functools.wraps(plain)
    def fit(model, x=None, *arguments, **named):
        with contextlib.suppress(TypeError):
            list(x.as_numpy_iterator())  # For a digest of all batches.
        found.append(x.batch_size)
        return plain(model, x, *arguments, **named)

    monkeypatch.setattr(keras.Model, "fit", fit)
    return found


def test_wrapped_fit_sees_batch_sizes_of_trials(tmp_path, tracked):
    searches.quick(tmp_path, searches.stock(batch_sizes=(8, 32)), kbatch.BatchSizeTuner)
    assert tracked == [8, 32]
    data = TrainingData(*models.rows(40))
    Workload(models.stock, data, "float32").start().run(8, lambda: None)
    assert tracked == [8, 32]
