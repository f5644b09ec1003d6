import pytest
import tensorflow as tf

from kbatch.device.failures import (
    device_is_lost,
    failure_status,
    failure_text,
    failure_traceback,
    ran_out_of_memory,
    smaller_may_run,
)
from kbatch.errors import UnsendableError, WorkerDied

errors = tf.errors

OUT_OF_MEMORY = [
    (errors.ResourceExhaustedError, "OOM when allocating tensor with shape[64,256,256,64]"),
    (errors.InternalError, "Failed to call cublas: CUBLAS_STATUS_ALLOC_FAILED"),
    (errors.InternalError, "Dst tensor is not initialized."),
    (errors.InvalidArgumentError, "Cannot parse tensor from proto: dtype: DT_FLOAT"),
    (errors.NotFoundError, "No algorithm worked!  Error: RESOURCE_EXHAUSTED: Allocating 8 bytes"),
    (errors.CancelledError, "[_Derived_]RESOURCE_EXHAUSTED: failed on another replica"),
]
NOT_STARTED = [
    (errors.InternalError, "failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED"),
    (errors.FailedPreconditionError, "DNN library initialization failed. Look above for details."),
    (errors.NotFoundError, "No algorithm worked!"),
    (errors.InternalError, "Autotuning failed for HLO: %gemm_fusion: No valid config found!"),
    (errors.AbortedError, "Collective ops is aborted by another replica"),
    (errors.CancelledError, "Function was cancelled before it was started"),
]
FAULTS = [
    errors.InternalError(None, None, "bad graph"),
    errors.InvalidArgumentError(None, None, "Incompatible shapes: [8] vs. [9]"),
    errors.NotFoundError(None, None, "no such file: memory.txt"),
    ValueError("out of memory is only in my text"),
]


@pytest.mark.parametrize(("kind", "text"), OUT_OF_MEMORY)
def test_failure_status_out_of_memory(kind, text):
    error = kind(None, None, text)
    assert failure_status(error) == "out_of_memory"
    assert not device_is_lost(error)


@pytest.mark.parametrize(("kind", "text"), NOT_STARTED)
def test_ran_out_of_memory_library_error_after_a_smaller_batch(kind, text):
    error = kind(None, None, text)
    assert failure_status(error) == "failed"
    assert ran_out_of_memory(error, smaller_worked=True)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        *((kind, text, True) for kind, text in OUT_OF_MEMORY + NOT_STARTED),
        (errors.UnknownError, "Failed to determine best cudnn convolution algorithm for: %x", True),
        (errors.InternalError, "Failed to execute XLA runtime executable: run time error", True),
        (errors.UnknownError, "Failed to determine best kernel", True),
        (errors.UnknownError, "RuntimeError: mine {{node PyFunc}}", False),
        (errors.InternalError, "CUDA_ERROR_ILLEGAL_ADDRESS", False),
        (errors.InvalidArgumentError, "Incompatible shapes: [8] vs. [9]", False),
        (errors.UnimplementedError, "XLA has no such operation", False),
    ],
)
def test_smaller_may_run(kind, text, expected):
    assert smaller_may_run(kind(None, None, text)) is expected


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_failure_status_fault_of_the_model(error):
    assert failure_status(error) == "failed"
    assert not ran_out_of_memory(error, smaller_worked=True)
    assert not device_is_lost(error)


@pytest.mark.parametrize(
    ("text", "out_of_memory"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", False),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", False),
        ("Failed to allocate: CUDA_ERROR_ILLEGAL_ADDRESS", True),
    ],
)
def test_device_is_lost(text, out_of_memory):
    error = errors.InternalError(None, None, text)
    assert device_is_lost(error)
    assert ran_out_of_memory(error) == out_of_memory


def test_failure_status_of_other_exceptions():
    assert failure_status(KeyboardInterrupt()) == "interrupted"
    full = UnsendableError("unread")
    full.__cause__ = MemoryError()
    for error in (MemoryError(), WorkerDied(-9, ""), full):
        assert failure_status(error) == "out_of_memory"
    for error in (WorkerDied(1, "out of memory"), UnsendableError("unread")):
        assert failure_status(error) == "failed"


def test_failure_text_is_one_line():
    text = failure_text(ValueError("\nin a layer:\n\n\x1b[1mwrong shape\x1b[0m" + "x" * 500))
    assert text.startswith("ValueError: in a layer: wrong shapexxx")
    assert len(text) == 300


def test_failure_traceback_keeps_the_end():
    try:
        raise ValueError("\x1b[1mwrong\x1b[0m shape" + "x" * 30_000)
    except ValueError as error:
        error.add_note("In the worker process: line 7")
        short = ValueError("wrong").with_traceback(error.__traceback__)
        long_text, text = failure_traceback(error), failure_traceback(short)
    assert "test_failures.py" in text
    assert text.endswith("ValueError: wrong\n")
    assert long_text.endswith("line 7\n")
    assert len(long_text) == 20_000
