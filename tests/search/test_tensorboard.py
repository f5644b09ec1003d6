"""The event files of a search with a TensorBoard callback, read back."""

import keras
import pytest
import searches
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kbatch


def scalars(folder):
    """The values of each scalar of a run, one an epoch."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_every_trial_has_its_figures_among_the_scalars(tmp_path):
    tuner = searches.search(
        tmp_path,
        searches.hypermodel(batch_sizes=(8, 32), dtype_policy="float32"),
        fit={"callbacks": [keras.callbacks.TensorBoard(str(tmp_path / "logs"))], "epochs": 3},
    )
    for trial in kbatch.load_study(tuner).trials:
        run = tmp_path / "logs" / trial.trial_id / "execution0"
        found = scalars(run / "kbatch")
        (execution,) = trial.executions
        metrics = [epoch.metrics for epoch in execution.epochs]
        assert found["batch_size"] == [trial.batch_size] * 3
        assert found["micro_batch_size"] == [8] * 3
        speeds = [m["samples_per_second"] for m in metrics if m.get("samples_per_second")]
        assert found["samples_per_second"] == pytest.approx(speeds, rel=1e-6)
        assert all(2**24 < value < 2**40 for value in found["host_memory_bytes"])
        assert ("noise_scale" in found) == (trial.batch_size > 8)  # Where batches are cut.
        validation = scalars(run / "validation")["epoch_accuracy"]
        assert validation == pytest.approx([m["val_accuracy"] for m in metrics])
