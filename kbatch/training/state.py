"""Save and restore the state of a model around a measurement, and set random seeds."""

import contextlib
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch import library_internals
from kbatch.analysis.batch_sizes import is_integer
from kbatch.library_internals import trained_variables
from kbatch.training.model import optimizers_of, user_step

# Attributes that `fit` and kbatch set on a model.
_ATTRIBUTES = ("train_step", "history", "stop_training")


class KeptState:
    """A copy of the weights, metrics, optimizer, seeds and train step of a built model."""

    def __init__(self, model: keras.Model):
        self._model: Any = model
        variables = [*model.variables, *self._model.metrics_variables]
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and user_step(model) is None:
            # Build it now, to save its state before the first update. If `restore` left it unbuilt,
            # it would be built again, and a loss scale would restart.
            with self._model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        # The custom train step of a model may build several optimizers, such as one for each
        # network, so some of their variables may not exist yet.
        self._optimizers = [(o, len(o.variables)) for o in optimizers_of(model)]
        self._initial_values: dict[int, list[np.ndarray]] = {}
        variables += [variable for o, _ in self._optimizers for variable in o.variables]
        self._variables = list({id(variable): variable for variable in variables}.values())
        self._values = copies_of(self._variables)
        self._attributes = {n: vars(model)[n] for n in _ATTRIBUTES if n in vars(model)}
        self._train_function = getattr(model, "train_function", None)
        self._steps = self._model.steps_per_execution

    def restore(self) -> None:
        self._model.reset_metrics()  # Metrics that were built later have no saved values.
        assign(self._variables, self._values)
        for optimizer, count in self._optimizers:
            assign(optimizer.variables[count:], self._initial(optimizer, count))
        for name in _ATTRIBUTES:
            vars(self._model).pop(name, None)
        for name, value in self._attributes.items():
            setattr(self._model, name, value)
        # Graphs read the number of steps of a `GraphCount` from a variable.
        changed = getattr(self._steps, "changed", int)
        self._model.steps_per_execution = changed(int(self._steps))
        self._model.train_function = self._train_function

    def _initial(self, optimizer: Any, count: int) -> list[np.ndarray]:
        """Return initial values of an optimizer's variables, except the first `count` of them."""
        if len(optimizer.variables) == count:
            return []
        if id(optimizer) not in self._initial_values:
            twin = type(optimizer).from_config(optimizer.get_config())
            with self._model.distribute_strategy.scope():
                twin.build(trained_variables(optimizer))
            self._initial_values[id(optimizer)] = copies_of(twin.variables[count:])
        return self._initial_values[id(optimizer)]


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[KeptState]:
    state = KeptState(model)
    try:
        yield state
    finally:
        state.restore()


def kept_variables(model: Any) -> contextlib.AbstractContextManager[None]:
    """Restore the variables of a model, except those of its optimizer, at the end of a context."""
    return kept_values([*model.variables, *model.metrics_variables])


@contextlib.contextmanager
def kept_values(variables: Sequence[Any]) -> Iterator[None]:
    values = copies_of(variables)
    try:
        yield
    finally:
        assign(variables, values)


def copies_of(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(tf.convert_to_tensor(variable.value)) for variable in variables]


def assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def check_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not is_integer(seed) or seed < 0:
        raise ValueError(
            f"`seed` must be None or an integer of at least 0. Received: seed={seed!r}."
        )
    return operator.index(seed)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed Python, NumPy and Keras, and restore Python's and NumPy's state afterwards."""
    # TensorFlow's global seed stays, because it cannot be read. The next build resets it.
    if seed is None:
        yield
        return
    with _kept_generators():
        keras.utils.set_random_seed(seed)
        yield


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Restore the random states of Python, NumPy, Keras and TensorFlow afterwards."""
    with _kept_generators(), library_internals.kept_seeds():
        yield


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_of(seed: int | None, *parts: int) -> int | None:
    """Derive another seed for a use with these numbers. If the seed is None, return None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1)[0])
