"""The event files of a search with a TensorBoard callback, read back."""

import keras
import pytest
import searches
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import kbatch


def accumulated(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder):
    """The values of each scalar of a run, one an epoch."""
    events = accumulated(folder)
    found = {}
    for tag in events.Tags()["tensors"]:
        found[tag] = [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
    return found


def hyperparameters(folder):
    """The values that the HParams page shows for a run."""
    data = accumulated(folder).PluginTagToContent("hparams")
    content = plugin_data_pb2.HParamsPluginData.FromString(data["_hparams_/session_start_info"])
    return {name: value.number_value for name, value in content.session_start_info.hparams.items()}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("board")
    tuner = searches.search(
        directory,
        searches.hypermodel(batch_sizes=(8, 32), dtype_policy="float32"),
        fit={"callbacks": [keras.callbacks.TensorBoard(str(directory / "logs"))], "epochs": 3},
    )
    return directory / "logs", kbatch.load_study(tuner)


def test_every_trial_has_its_figures_among_the_scalars(logged):
    logs, study = logged
    for trial in study.trials:
        found = scalars(logs / trial.trial_id / "execution0" / "kbatch")
        epochs = trial.executions[0].epochs
        assert found["batch_size"] == [trial.batch_size] * 3
        assert found["micro_batch_size"] == [8] * 3
        speeds = [epoch.metrics.get("samples_per_second") for epoch in epochs]
        measured = [pytest.approx(speed, rel=1e-6) for speed in speeds if speed is not None]
        assert measured
        assert found["samples_per_second"] == measured
        assert all(2**24 < value < 2**40 for value in found["host_memory_bytes"])
        ratios = [
            pytest.approx(m["gradient_variance"] / m["gradient_squared_norm"], rel=1e-5)
            for m in (epoch.metrics for epoch in epochs)
            if (m.get("gradient_variance") or 0) > 0 and (m.get("gradient_squared_norm") or 0) > 0
        ]
        assert found.get("noise_scale", []) == ratios
        assert bool(ratios) == (trial.batch_size > 8)  # Where the batch was cut.
        run = logs / trial.trial_id / "execution0"
        assert hyperparameters(run)["batch_size"] == trial.batch_size


def test_the_scalars_of_keras_stay(logged):
    logs, study = logged
    (execution,) = study.trials[0].executions
    found = scalars(logs / study.trials[0].trial_id / "execution0" / "validation")
    assert found["epoch_accuracy"] == [
        pytest.approx(epoch.metrics["val_accuracy"]) for epoch in execution.epochs
    ]
