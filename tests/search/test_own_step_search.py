"""Searches of models with a custom `train_step`."""

import keras_tuner
import own_steps
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch

X, Y = models.rows(94)
VALIDATION, _ = models.rows(40, seed=1)


def search(directory, build, micro_batch_size, *, y=None, objective, validation=None, **settings):
    defaults = {"micro_batch_size": micro_batch_size, "dtype_policy": "float32"}
    hypermodel = searches.hypermodel(build, **(defaults | {"batch_sizes": (8, 32)} | settings))
    tuner = searches.tuner(directory, hypermodel, objective=keras_tuner.Objective(objective, "min"))
    tuner.search(X, y, validation_data=validation, epochs=2, verbose=0)
    return kbatch.load_study(tuner)


def test_search_trains_custom_step_whole_with_a_note(tmp_path):
    trials = search(tmp_path, own_steps.gan, 8, objective="g_loss").trials
    small, large = (trial.executions[0] for trial in trials)
    for run, updates in ((small, 24), (large, 6)):
        # The model also has an optimizer that makes no updates.
        assert (run.status, run.updates, run.optimizer) == ("completed", updates, "Adam")
        assert run.micro_batch_size == run.batch_size == run.batch_size_seen
    assert ["own_step_whole" in [note.code for note in trial.notes] for trial in trials] == [
        False,
        True,
    ]
    assert trials[0].noise_scale is None
    assert large.learning_rate == pytest.approx(2 * small.learning_rate)
    assert "g_loss" in trials[0].metrics


class Unscaled(own_steps.TestedVAE):
    """Its step does not scale the loss, like most steps that are written for float32."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def test_search_trains_custom_step_without_loss_scale_in_float32(tmp_path):
    build = models.Locked(lambda: own_steps.vae(kind=Unscaled))
    arguments = {"objective": "val_loss", "validation": (VALIDATION,)}
    arguments |= {"batch_sizes": (32,), "base_batch_size": 32}
    with pytest.warns(UserWarning, match="scale_loss"):
        study = search(tmp_path, build, None, dtype_policy=None, **arguments)
    (trial,) = study.trials
    assert (trial.status, trial.dtype_policy) == ("completed", "float32")
    assert any("scale_loss" in note for note in trial.executions[0].notes)
