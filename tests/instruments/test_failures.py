import pytest
import tensorflow as tf

from kbatch.instruments.failures import failure_status, failure_text

CASES = [
    (tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor"), "out_of_memory"),
    (MemoryError(), "out_of_memory"),
    (tf.errors.InternalError(None, None, "CUBLAS_STATUS_ALLOC_FAILED"), "out_of_memory"),
    (tf.errors.UnknownError(None, None, "Failed to allocate scratch"), "out_of_memory"),
    (tf.errors.InternalError(None, None, "Dst tensor is not initialized."), "out_of_memory"),
    (tf.errors.InternalError(None, None, "bad graph"), "failed"),
    (ValueError("out of memory is only in my text"), "failed"),
    (KeyboardInterrupt(), "interrupted"),
]


@pytest.mark.parametrize(("error", "status"), CASES)
def test_only_what_says_memory_is_memory(error, status):
    assert failure_status(error) == status


def test_a_failure_is_told_in_one_line():
    text = failure_text(ValueError("\nin a layer:\n\n\x1b[1mwrong shape\x1b[0m" + "x" * 500))
    assert text.startswith("ValueError: in a layer: wrong shapexxx")
    assert len(text) == 300
