"""The state of a model, kept while it is trained for a measurement, and the seeds of training."""

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
from kbatch.library_internals import trained_by
from kbatch.training.model import optimizers_of, user_step

# What `fit` and kbatch set on a model itself.
_ATTRIBUTES = ("train_step", "history", "stop_training")


class KeptState:
    """Weights, metrics, optimizer, seeds and train step of a built model, as they are now."""

    def __init__(self, model: keras.Model):
        self._model: Any = model
        found = [*model.variables, *self._model.metrics_variables]
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and user_step(model) is None:
            # What is kept is its state before the first update; built again, a loss scale restarts.
            with self._model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        # A model with a train step of its own may have several, such as one for each network. That
        # step builds them, so some of their variables are not there yet.
        self._optimizers = [(one, len(one.variables)) for one in optimizers_of(model)]
        self._firsts: dict[int, list[np.ndarray]] = {}
        found += [variable for one, _ in self._optimizers for variable in one.variables]
        self._variables = list({id(variable): variable for variable in found}.values())
        self._values = copies_of(self._variables)
        self._attributes = {n: vars(model)[n] for n in _ATTRIBUTES if n in vars(model)}
        self._train_function = getattr(model, "train_function", None)
        self._steps = self._model.steps_per_execution

    def restore(self) -> None:
        self._model.reset_metrics()  # Those that came since then were not kept.
        assign(self._variables, self._values)
        for optimizer, kept in self._optimizers:
            assign(optimizer.variables[kept:], self._first(optimizer, kept))
        for name in _ATTRIBUTES:
            vars(self._model).pop(name, None)
        for name, value in self._attributes.items():
            setattr(self._model, name, value)
        # Graphs may read the number of steps from a variable, as of a `GraphCount`.
        changed = getattr(self._steps, "changed", int)
        self._model.steps_per_execution = changed(int(self._steps))
        self._model.train_function = self._train_function

    def _first(self, optimizer: Any, kept: int) -> list[np.ndarray]:
        """Return the initial values of the variables that an optimizer has got since then."""
        if len(optimizer.variables) == kept:
            return []
        if id(optimizer) not in self._firsts:
            twin = type(optimizer).from_config(optimizer.get_config())
            with self._model.distribute_strategy.scope():
                twin.build(trained_by(optimizer))
            self._firsts[id(optimizer)] = copies_of(twin.variables[kept:])
        return self._firsts[id(optimizer)]


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[KeptState]:
    state = KeptState(model)
    try:
        yield state
    finally:
        state.restore()


def kept_variables(model: Any) -> contextlib.AbstractContextManager[None]:
    """Put the variables of a model back as they were, for calls that do not train."""
    return kept_values([*model.variables, *model.metrics_variables])


@contextlib.contextmanager
def kept_values(variables: Sequence[Any]) -> Iterator[None]:
    kept = copies_of(variables)
    try:
        yield
    finally:
        assign(variables, kept)


def copies_of(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(tf.convert_to_tensor(one.value)) for one in variables]


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
    """Seed Python, NumPy and Keras, and put the first two back afterwards."""
    # TensorFlow's own global seed cannot be read; keras-tuner resets it before the next build.
    if seed is None:
        yield
        return
    with _kept_generators():
        keras.utils.set_random_seed(seed)
        yield


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Put the random numbers of Python, NumPy, Keras and TensorFlow back where they were."""
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
    """Derive a seed for one use of several."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1)[0])
