"""What went wrong when a step raised: want of memory, a lost device, or a fault of the model.

TensorFlow has one error class for running out of memory and many ways of not raising it: cuDNN,
cuBLAS, XLA and collectives report it under classes of their own, in their text.
"""

import re
import traceback

import tensorflow as tf

from kbatch.errors import UnsendableError, WorkerDied

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_MOST_TRACEBACK_CHARACTERS = 20_000

_OUT_OF_MEMORY = (
    "out of memory",
    "out_of_memory",  # CUDA_ERROR_OUT_OF_MEMORY
    "oom when allocating",
    "resource_exhausted",
    "resource exhausted",
    "failed to allocate",
    "could not allocate",
    "_status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    "cufft_alloc_failed",
    # A copy to a GPU that has no room left.
    "dst tensor is not initialized",
    # A constant of a graph for which there is no room.
    "cannot parse tensor from proto",
)
# A library that could not start or found no way: for want of memory, or since it never worked here.
_NOT_STARTED = (
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error",
    "cusolver_status_not_initialized",
    "failed to create cublas handle",
    # The same, said by the operation: the reason stands in the log alone.
    "streamexecutor without blas support",
    "blas xgem",  # xGEMM, xGEMMBatched and xGEMV "launch failed"
    "could not create cudnn handle",
    "cudnn failed to initialize",
    "dnn library initialization failed",
    "dnn library is not found",
    "no algorithm worked",
    "no algorithm without scratch worked",
    # XLA's autotuning, whose trials had no room.
    "failed to determine best cudnn convolution algorithm",
    "autotuner could not find any supported config",
    "autotuning failed for hlo",
    # What the other replicas say when one has failed.
    "collective ops is aborted",
    "function was cancelled before it was started",
)
# Errors that stay: every later call in the process fails with them.
_DEVICE_LOST = (
    "cuda_error_illegal_address",
    "cuda_error_launch_failed",
    "cuda_error_misaligned_address",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_assert",
    "cuda_error_hardware_stack_error",
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "device-side assert triggered",
)

# Errors of a device, or of a library that runs on it.
_OF_DEVICE = (
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
)
# The kinds of exception that may say so; all others say something else.
MEMORY_ERRORS = (tf.errors.OpError, MemoryError, UnsendableError, WorkerDied)


def ran_out_of_memory(error: BaseException, *, smaller_worked: bool = False) -> bool:
    if isinstance(error, WorkerDied):
        return error.out_of_memory
    if isinstance(error, UnsendableError) and error.__cause__ is not None:
        # It could not be read where there was no room.
        return ran_out_of_memory(error.__cause__, smaller_worked=smaller_worked)
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    texts = (*_OUT_OF_MEMORY, *_NOT_STARTED) if smaller_worked else _OUT_OF_MEMORY
    return isinstance(error, tf.errors.OpError) and _says(error, texts)


def smaller_may_run(error: BaseException) -> bool:
    """Return whether a train step of fewer examples may run after an error, whatever its text.

    XLA and the libraries that it calls say in many ways that memory ran out, and new versions in
    new ways. The device raises these kinds of error, and no model does.
    """
    if ran_out_of_memory(error, smaller_worked=True):
        return True
    of_device = isinstance(error, _OF_DEVICE) and "PyFunc" not in str(error)
    return of_device and not device_is_lost(error)


def device_is_lost(error: BaseException) -> bool:
    """Return whether nothing can run on the GPU in this process any more."""
    return isinstance(error, tf.errors.OpError) and _says(error, _DEVICE_LOST)


def failure_status(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out_of_memory" if ran_out_of_memory(error) else "failed"


# Whatever the batch size: values that an operation refuses, files that cannot be read.
_REFUSALS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
)
# What a function of Python raised in the graph, such as the generator of a dataset.
OF_PYTHON = "{{node PyFunc}}"
_LENGTHS = ("MaybeMoveContiguousSlices", "Cannot batch tensors with different shapes")


def refusal(error: BaseException) -> str | None:
    """Say what to mend where no batch size could train, None of another failure."""
    cause = cause_of(error)
    if isinstance(error, tf.errors.OpError) and any(text in cause for text in _LENGTHS):
        return (
            "Rows of different lengths cannot be joined to a batch: give a function "
            "`batch_size -> dataset.padded_batch(batch_size)`."
        )
    of_python = isinstance(error, tf.errors.OpError) and OF_PYTHON in str(error)
    # One shape may come of one batch size only.
    refused = isinstance(error, _REFUSALS) and not re.search("shape|dimension", cause, re.I)
    known = ran_out_of_memory(error, smaller_worked=True) or device_is_lost(error)
    if known or not (of_python or refused):
        return None
    return (
        "Training fails on these data at every batch size: fix the data, or the model that takes "
        f"them. Received: {failure_text(error)}"
    )


def failure_text(error: BaseException) -> str:
    """Describe an exception in one line of at most 300 characters."""
    return f"{type(error).__name__}: {cause_of(error)}".strip(" :")[:300]


# What stands around the cause in an error of TensorFlow: nodes, and the way to the data.
_AROUND = re.compile(
    r"\{\{[^{}]*\}\}|\[Op:[^\]]*\]( name:)?|"
    r"Error in user-defined function passed to .* iterator: \S+: "
)
_PLACES = ("Graph execution error", "Detected at", "<stack traces", "Traceback ", "The above exc")


def cause_of(error: BaseException) -> str:
    """Return what an exception says in one line, without the places in a graph."""
    lines = [COLOURS.sub("", line) for line in str(error).splitlines() if line.strip()]
    if isinstance(error, tf.errors.OpError):
        # Those of a stack, and the nodes, are indented.
        said = [line for line in lines if not line[0].isspace()]
        places = [i for i, line in enumerate(said) if line.startswith(_PLACES)]
        said = said[places[-1] + 1 if places else 0 :]
        lines = [_AROUND.sub("", line) for line in said] or lines
    # Keras's messages name the place in their first line and the cause in the next ones.
    return " ".join([line.strip() for line in lines][:3]).strip()


def failure_traceback(error: BaseException) -> str:
    """Write the traceback of an exception, that of another process included; its end if long."""
    text = COLOURS.sub("", "".join(traceback.format_exception(error)))
    return text[-_MOST_TRACEBACK_CHARACTERS:]


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(text in said for text in texts)
