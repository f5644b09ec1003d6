"""What probes make of the ways in which a load can fail, without a device that fails so."""

import keras
import pytest
import tensorflow as tf

from kbatch.profiling.memory_probes import ProcessProbes, worker_probes
from kbatch.training.errors import DeviceLostError

NO_LIBRARY = "failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED"
LOST = "Failed to allocate 8 bytes: CUDA_ERROR_ILLEGAL_ADDRESS"


class FailingRun:
    """A load that fails from a size on, as a GPU would."""

    training, examples, note, variables_bytes, step_s = True, None, None, 4, None

    def __init__(self, text, *, above=8):
        self.model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
        self.text, self.above = text, above

    def run(self, batch_size):
        if batch_size > self.above:
            raise tf.errors.InternalError(None, None, self.text)
        return batch_size

    def left_out_bytes(self, batch_size):
        return 0


def test_a_library_that_does_not_start_is_want_of_memory_after_a_smaller_size_alone():
    probes = ProcessProbes(FailingRun(NO_LIBRARY), None, "here")
    with pytest.raises(tf.errors.InternalError, match="NOT_INITIALIZED"):
        probes.read(16)
    assert probes.read(8).peak_bytes is not None
    assert probes.read(16).peak_bytes is None


def test_a_lost_device_ends_what_runs_in_this_process():
    probes = ProcessProbes(FailingRun(LOST), None, "here")
    with pytest.raises(DeviceLostError, match="isolate=True"):
        probes.read(16)


class FailingLoad:
    """The same load, in the process that starts it."""

    def start(self):
        return FailingRun(LOST)


def test_a_worker_that_lost_its_device_is_replaced_and_the_next_size_runs():
    with worker_probes(FailingLoad(), None) as probes:
        lost = probes.read(16)
        assert lost.lost
        assert lost.peak_bytes is None
        assert probes._worker._process is None
        assert probes.read(8).peak_bytes is not None
