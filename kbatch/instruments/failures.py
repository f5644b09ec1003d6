"""What went wrong when a training run raised."""

import tensorflow as tf

# What cuDNN and cuBLAS say when they could not allocate, under error classes of their own.
_ALLOCATION_TEXTS = (
    "out of memory",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "could not allocate",
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
    """Describes an exception in one line of at most 300 characters."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first_line}".strip(" :")[:300]
