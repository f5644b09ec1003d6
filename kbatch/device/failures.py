"""Classify errors of a step: out of memory, a lost device, or a fault of the model or the data.

TensorFlow has one error class for out of memory. But cuDNN, cuBLAS, XLA and collectives report it
with other classes, and only the text says so.
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
    "dst tensor is not initialized",  # A copy to a GPU that is full.
    "cannot parse tensor from proto",  # A constant of a graph that does not fit.
)
# A library did not start or found no algorithm. If a smaller batch ran, the cause is memory.
_NOT_STARTED = (
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error",
    "cusolver_status_not_initialized",
    "failed to create cublas handle",
    # Raised by operations. Only TensorFlow's log names the cause.
    "streamexecutor without blas support",
    "blas xgem",  # xGEMM, xGEMMBatched and xGEMV "launch failed"
    "could not create cudnn handle",
    "cudnn failed to initialize",
    "dnn library initialization failed",
    "dnn library is not found",
    "no algorithm worked",
    "no algorithm without scratch worked",
    # From XLA's autotuning, whose trials need memory too.
    "failed to determine best cudnn convolution algorithm",
    "autotuner could not find any supported config",
    "autotuning failed for hlo",
    # From the other replicas when one has failed.
    "collective ops is aborted",
    "function was cancelled before it was started",
)
# After one of these errors, every later call in the process fails too.
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
_DEVICE_ERRORS = (
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
)
# The exceptions that may mean out of memory.
MEMORY_ERRORS = (tf.errors.OpError, MemoryError, UnsendableError, WorkerDied)


def ran_out_of_memory(error: BaseException, *, smaller_worked: bool = False) -> bool:
    if isinstance(error, WorkerDied):
        return error.out_of_memory
    if isinstance(error, UnsendableError) and error.__cause__ is not None:
        # The worker may have had too little memory to read the value.
        return ran_out_of_memory(error.__cause__, smaller_worked=smaller_worked)
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    texts = (*_OUT_OF_MEMORY, *_NOT_STARTED) if smaller_worked else _OUT_OF_MEMORY
    return isinstance(error, tf.errors.OpError) and _says(error, texts)


def smaller_may_run(error: BaseException) -> bool:
    """Return whether a smaller batch may run after this error, whatever its text.

    XLA and its libraries report out of memory with many texts, and new versions add more. But only
    the device raises these classes of errors, and no model does.
    """
    if ran_out_of_memory(error, smaller_worked=True):
        return True
    from_device = isinstance(error, _DEVICE_ERRORS) and "PyFunc" not in str(error)
    return from_device and not device_is_lost(error)


def device_is_lost(error: BaseException) -> bool:
    """Return whether the GPU can run nothing more in this process."""
    return isinstance(error, tf.errors.OpError) and _says(error, _DEVICE_LOST)


def failure_status(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out_of_memory" if ran_out_of_memory(error) else "failed"


# Errors at any batch size: an operation refuses a value, or a file cannot be read.
_REFUSALS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
)
# Marks an error that a Python function raised in a graph, such as the generator of a dataset.
OF_PYTHON = "{{node PyFunc}}"
_LENGTHS = ("MaybeMoveContiguousSlices", "Cannot batch tensors with different shapes")


def refusal(error: BaseException) -> str | None:
    """Return what to fix if the error would occur at every batch size, or None if not."""
    cause = cause_of(error)
    if isinstance(error, tf.errors.OpError) and any(text in cause for text in _LENGTHS):
        return (
            "The rows differ in length and cannot form a batch: give a function "
            "`batch_size -> dataset.padded_batch(batch_size)`."
        )
    from_python = isinstance(error, tf.errors.OpError) and OF_PYTHON in str(error)
    # An error about a shape may occur at one batch size only.
    refused = isinstance(error, _REFUSALS) and not re.search("shape|dimension", cause, re.I)
    of_device = ran_out_of_memory(error, smaller_worked=True) or device_is_lost(error)
    if of_device or not (from_python or refused):
        return None
    return (
        "Training fails with this data at every batch size: fix the data or the model. "
        f"Received: {failure_text(error)}"
    )


def failure_text(error: BaseException) -> str:
    """Describe an exception in one line of at most 300 characters."""
    return f"{type(error).__name__}: {cause_of(error)}".strip(" :")[:300]


# Parts of a TensorFlow error message that do not name the cause: nodes, and places in the data.
_AROUND = re.compile(
    r"\{\{[^{}]*\}\}|\[Op:[^\]]*\]( name:)?|"
    r"Error in user-defined function passed to .* iterator: \S+: "
)
_PLACES = ("Graph execution error", "Detected at", "<stack traces", "Traceback ", "The above exc")


def cause_of(error: BaseException) -> str:
    """Return the cause from an exception's message as one line, without places in a graph."""
    lines = [COLOURS.sub("", line) for line in str(error).splitlines() if line.strip()]
    if isinstance(error, tf.errors.OpError):
        # Lines of a stack and of nodes are indented.
        message = [line for line in lines if not line[0].isspace()]
        places = [i for i, line in enumerate(message) if line.startswith(_PLACES)]
        message = message[places[-1] + 1 if places else 0 :]
        lines = [_AROUND.sub("", line) for line in message] or lines
    # Keras's messages name the place in the first line and the cause in the next ones.
    return " ".join([line.strip() for line in lines][:3]).strip()


def failure_traceback(error: BaseException) -> str:
    """Return the traceback of an exception, with that of a worker; if it is long, only its end."""
    text = COLOURS.sub("", "".join(traceback.format_exception(error)))
    return text[-_MOST_TRACEBACK_CHARACTERS:]


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(text in message for text in texts)
