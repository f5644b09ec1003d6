"""Seeds of weights and of the order of examples."""

import contextlib
import operator
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from tensorflow.python.eager import context


def check_seed(seed: int | None) -> int | None:
    """Checks that a seed is None or an integer of at least 0.

    Raises:
        ValueError: If it is not.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
        raise ValueError(
            f"`seed` must be None or an integer of at least 0. Received: seed={seed!r}."
        )
    return operator.index(seed)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seeds Python, NumPy and Keras, and puts the first two back afterwards.

    TensorFlow's own global seed cannot be read; keras-tuner resets it before the next build.

    Args:
        seed: The seed; None leaves everything alone, so that each run draws on.
    """
    if seed is None:
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        keras.utils.set_random_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Puts the random numbers of Python, NumPy, Keras and TensorFlow back where they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # TensorFlow numbers its operations by draws from a generator of its own.
    tensorflow: Any = context.context()
    tensorflow_seed, tensorflow_state = tensorflow._seed, _state_of(tensorflow)
    keras_seed = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    generator: Any = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    drawn = None if generator is None else np.array(generator.state.value)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if tensorflow._seed != tensorflow_seed:
            tensorflow._set_global_seed(tensorflow_seed)
        if tensorflow_state is not None:
            tensorflow._rng.setstate(tensorflow_state)
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, keras_seed)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(drawn)


def _state_of(tensorflow: Any) -> Any:
    generator = getattr(tensorflow, "_rng", None)
    return None if generator is None else generator.getstate()


def seed_of(seed: int | None, *parts: int) -> int | None:
    """Derives a seed for one use of several.

    Args:
        seed: Seed of the whole, or None.
        parts: What tells this use from the others.

    Returns:
        A 32-bit seed, None for None.
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1)[0])
