"""What went wrong when a training run raised."""

import re
import traceback

import tensorflow as tf

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_MOST_TRACEBACK_CHARACTERS = 20_000

# What cuDNN and cuBLAS say when they could not allocate, under error classes of their own.
_ALLOCATION_TEXTS = (
    "out of memory",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "could not allocate",
    # A copy to a GPU that has no room left.
    "dst tensor is not initialized",
)


def failure_status(error: BaseException) -> str:
    """Classifies an exception as a status of an execution.

    Args:
        error: What training raised.

    Returns:
        `"out_of_memory"`, `"interrupted"` or `"failed"`.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return "out_of_memory"
    if isinstance(error, (tf.errors.InternalError, tf.errors.UnknownError)):
        text = str(error).lower()
        return "out_of_memory" if any(t in text for t in _ALLOCATION_TEXTS) else "failed"
    return "failed"


def failure_text(error: BaseException) -> str:
    """Describes an exception in one line of at most 300 characters.

    Keras's messages name the place in their first line and the cause in the next ones.
    """
    lines = [_COLOURS.sub("", line).strip() for line in str(error).splitlines()]
    text = " ".join([line for line in lines if line][:3])
    return f"{type(error).__name__}: {text}".strip(" :")[:300]


def failure_traceback(error: BaseException) -> str:
    """Writes the traceback of an exception, that of another process included; its end if long."""
    text = _COLOURS.sub("", "".join(traceback.format_exception(error)))
    return text[-_MOST_TRACEBACK_CHARACTERS:]
