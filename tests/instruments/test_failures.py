import pytest
import tensorflow as tf

from kbatch.instruments.failures import failure_status, failure_text, failure_traceback

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


def test_a_traceback_names_the_place_and_keeps_the_end_of_a_long_one():
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
