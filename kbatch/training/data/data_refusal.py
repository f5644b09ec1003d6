"""What to give in the place of data that a train step refused."""

from collections.abc import Callable

import keras
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.data_source import Source
from kbatch.training.data.row_mismatch import row_mismatch
from kbatch.training.data.sample_rows import SampleElements, SampleRows

# What TensorFlow raises of data; Keras raises a ValueError or TypeError, as a model's own code may.
REFUSALS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


def refusal_text(
    error: Exception, *, model: Callable[[], keras.Model], source: Source
) -> str | None:
    """Says what to give in the place of data that a train step refused.

    Args:
        error: What was raised.
        model: Gives the model.
        source: Its data.

    Returns:
        The message; None where the error tells it, or is one of the model's own.
    """
    if isinstance(error, InputError):
        return None
    if isinstance(source, (SampleRows, SampleElements)):
        built = model()
        rows = source.rows(built) if isinstance(source, SampleElements) else source
        mismatch = row_mismatch(built, rows.rows)
        if mismatch is not None:
            return mismatch
    if not isinstance(error, REFUSALS):
        return None
    return (
        "A train step must run on the data: give inputs that the model takes, and targets that its "
        f"loss takes. Received: {_told(error)}"
    )


def _told(error: Exception) -> str:
    """Finds what TensorFlow's error tells, behind the places in its graph."""
    places = ("File ", "Detected at", "Graph execution", "[[", "Original stack", "Node:")
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(places)]
    return told[-1][:200] if told else type(error).__name__
