"""Seeds of weights and of the order of examples."""

import contextlib
import operator
import random
from collections.abc import Iterator

import keras
import numpy as np


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
