"""A model that is kept: the numbers that its graphs read again, and how its state is set back."""

from typing import Any

import tensorflow as tf

from kbatch.training.learning_rate import followed_settings
from kbatch.training.steps_per_execution import counted_steps


class GraphNumber(float):
    """A number that a traced graph reads again each time it runs, as it reads a variable.

    Python sees a float; where TensorFlow makes a tensor of it, it reads a variable. `1 - x`, by
    which moving averages are written, reads one of its own: it is rounded once, as in Python.
    """

    dtype = "float32"
    _variables: Any

    def __new__(cls, value: float, variables: Any = None):
        self = super().__new__(cls, value)
        with tf.init_scope():
            self._variables = variables or [
                tf.Variable(tf.constant(one, tf.float32), trainable=False)
                for one in (value, 1 - value)
            ]
        return self

    def changed(self, value: float) -> "GraphNumber":
        """Return the number that the graphs of this one read from now on."""
        for variable, one in zip(self._variables, (value, 1 - value), strict=True):
            variable.assign(one)
        return GraphNumber(value, self._variables)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._variables[0].read_value(), dtype or tf.float32, name=name)

    def __rsub__(self, other: Any) -> Any:
        if tf.inside_function() and other == 1:
            return GraphNumber(1 - float(self), self._variables[::-1])
        return super().__rsub__(other)

    def __reduce__(self):
        return float, (float(self),)


def read_settings(model: Any) -> None:
    """Let the graphs of a model that is not traced yet read what follows the batch size."""
    for owner, name in followed_settings(model):
        setattr(owner, name, GraphNumber(getattr(owner, name)))
    model.steps_per_execution = counted_steps(model, model.steps_per_execution)
    # A build function may return the model of another trial, with its graphs.
    model.train_function = model.test_function = model.predict_function = None


def set_state(kept: Any, fresh: Any) -> None:
    """Give a model that was trained the state of one that was just built."""
    settings = zip(followed_settings(kept), followed_settings(fresh), strict=True)
    for (mine, name), (its, _) in settings:
        setattr(mine, name, getattr(mine, name).changed(getattr(its, name)))
    if kept.steps_per_execution != fresh.steps_per_execution:
        kept.predict_function = None  # Its kind follows the number of steps.
    kept.steps_per_execution = kept.steps_per_execution.changed(fresh.steps_per_execution)
    mine, its = kept.optimizer, fresh.optimizer
    if not mine.built:
        mine.build(kept.trainable_variables)
    if not its.built:  # The slots of a twin go at once, where `fresh` lives as long as its trial.
        its = type(its).from_config(its.get_config())
        its.build(fresh.trainable_variables)
    variables = zip(
        (*kept.variables, *mine.variables), (*fresh.variables, *its.variables), strict=True
    )
    for variable, other in variables:  # The rate is among them.
        variable.assign(other.value)
    kept.reset_metrics()
    kept.stop_training = False
