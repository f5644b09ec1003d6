"""What went wrong when a step raised: want of memory, a lost device, or a fault of the model.

TensorFlow has one error class for running out of memory and many ways of not raising it: cuDNN,
cuBLAS, XLA and collectives report it under classes of their own, in their text.
"""

import re
import traceback

import tensorflow as tf

from kbatch.device.worker import UnsendableError, WorkerDied

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


def device_is_lost(error: BaseException) -> bool:
    """Return whether nothing can run on the GPU in this process any more."""
    return isinstance(error, tf.errors.OpError) and _says(error, _DEVICE_LOST)


def failure_status(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "out_of_memory" if ran_out_of_memory(error) else "failed"


def failure_text(error: BaseException) -> str:
    """Describe an exception in one line of at most 300 characters."""
    # Keras's messages name the place in their first line and the cause in the next ones.
    lines = [COLOURS.sub("", line).strip() for line in str(error).splitlines()]
    text = " ".join([line for line in lines if line][:3])
    return f"{type(error).__name__}: {text}".strip(" :")[:300]


def failure_traceback(error: BaseException) -> str:
    """Write the traceback of an exception, that of another process included; its end if long."""
    text = COLOURS.sub("", "".join(traceback.format_exception(error)))
    return text[-_MOST_TRACEBACK_CHARACTERS:]


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(text in said for text in texts)
