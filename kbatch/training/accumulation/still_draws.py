"""Random draws held still, so that passes over different rows can be compared.

A draw of shape (rows, ...) depends on how many rows there are: a part of a batch never gets the
draws that its rows have in the whole batch. So each row gets the same draw, and dropout keeps all.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import random

_DRAWS = ("normal", "uniform", "truncated_normal", "randint")


class StillDraws:
    """The draws of one pass after the other."""

    def __init__(self):
        self._count = 0

    def restart(self) -> None:
        """Begin a pass, whose draws are those of the pass before."""
        self._count = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold still what Keras draws; nothing that is traced here may be used elsewhere."""
        kept = {name: getattr(random, name) for name in (*_DRAWS, "dropout")}
        try:
            for name in _DRAWS:
                setattr(random, name, self._still(kept[name]))
            random.dropout = lambda inputs, *args, **kwargs: inputs
            yield
        finally:
            for name, function in kept.items():
                setattr(random, name, function)

    def _still(self, draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        signature = inspect.signature(draw)

        def drawn(*args: Any, **kwargs: Any) -> tf.Tensor:
            self._count += 1
            call = signature.bind(*args, **kwargs)
            shape = call.arguments["shape"]
            sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
            call.arguments |= {"seed": self._count, "shape": [1, *sizes[1:]] if sizes else []}
            return tf.broadcast_to(draw(*call.args, **call.kwargs), sizes)

        return drawn
