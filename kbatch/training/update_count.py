"""The updates that an optimizer has made."""

from typing import Any

import keras


def updates_made(model: Any) -> int:
    """Counts the updates of a model's optimizer; it skips those that overflowed."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    iterations: Any = keras.ops.convert_to_numpy(optimizer.iterations)
    return int(iterations)
