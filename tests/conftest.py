"""What makes the tests quick and the same on every machine: none of it is the point of a test."""

import gc
import os
import sys

import pytest

# TensorFlow leaves oneDNN out on some processors. Its own convolutions then take 30 MB of scratch
# memory each, and no small limit of a test would hold.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def pytest_collection_finish(session):
    _leave_out_of_collections()
    # Each traced function is optimised before it first runs, which takes longer than the few
    # steps of a test. The slow tests train through TensorFlow's optimisations.
    slow = (item.get_closest_marker(name) for item in session.items for name in ("slow", "gpu"))
    if "tensorflow" in sys.modules and not any(slow):
        options = {"disable_meta_optimizer": True}
        sys.modules["tensorflow"].config.optimizer.set_experimental_options(options)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Keep what a module's tests left in TensorFlow out of the collections of the next ones."""
    yield
    _leave_out_of_collections()


def _leave_out_of_collections():
    # Keras and keras-tuner collect garbage several times a trial, which otherwise looks at
    # all that TensorFlow ever made.
    gc.collect()
    gc.freeze()
