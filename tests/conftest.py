"""What makes the tests quick and the same on every machine: none of it is the point of a test."""

import functools
import gc
import os
import sys

import numpy as np
import pytest

# TensorFlow leaves oneDNN out on some processors. Its own convolutions then take 30 MB of scratch
# memory each, and no small limit of a test would hold.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# No file of a test has to survive a power failure.
os.fsync = lambda file: None
# Importing TensorFlow and all tests leaves nothing to collect.
gc.disable()
# A search asks whether objects are frozen. Here there always are, and counting all of them is slow.
gc.get_freeze_count = functools.wraps(gc.get_freeze_count)(lambda: 1)


def pytest_collection_finish(session):
    # Tracing a function makes hundreds of thousands of objects, nearly all of which stay.
    gc.set_threshold(100_000, 50, 100)
    gc.enable()
    _leave_out_of_collections()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Each traced function is optimised before it first runs, which takes longer than the few
    # steps of a test. What must hold through TensorFlow's optimisations is in the slow tests of
    # training, and in all that runs in a process of its own.
    if "tensorflow" not in sys.modules:
        return
    optimizer = sys.modules["tensorflow"].config.optimizer
    slow = item.get_closest_marker("slow") and item.path.parent.name == "training"
    options = {"disable_meta_optimizer": not (slow or item.get_closest_marker("gpu"))}
    if options.items() - optimizer.get_experimental_options().items():
        optimizer.set_experimental_options(options)


@pytest.fixture(autouse=True)
def quick_collections():
    """Keep what a test left in TensorFlow out of the collections of the next ones.

    The threads of an iterator of tf.data that is freed late may not be told so: whoever frees it
    waits for them, for as long as it has lived.
    """
    before = _collections()
    yield
    if (_collections() - before).any() or gc.get_count()[0] > 5_000:  # Most tests make few objects.
        _leave_out_of_collections()


def _collections():
    # Those of the youngest objects, and those of all, which Keras and keras-tuner ask for.
    return np.array([gc.get_stats()[generation]["collections"] for generation in (0, 2)])


def _leave_out_of_collections():
    # Keras and keras-tuner collect garbage several times a trial, which otherwise looks at
    # all that TensorFlow ever made.
    gc.collect()
    gc.freeze()
