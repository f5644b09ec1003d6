"""What makes the tests quick: neither of the two is the point of any of them."""

import gc
import sys


def pytest_collection_finish(session):
    # Keras and keras-tuner collect garbage several times a trial, which otherwise looks at
    # all that TensorFlow made at its import.
    gc.collect()
    gc.freeze()
    # Each traced function is optimised before it first runs, which takes longer than the few
    # steps of a test. The slow tests train through TensorFlow's optimisations.
    slow = (item.get_closest_marker(name) for item in session.items for name in ("slow", "gpu"))
    if "tensorflow" in sys.modules and not any(slow):
        options = {"disable_meta_optimizer": True}
        sys.modules["tensorflow"].config.optimizer.set_experimental_options(options)
