"""The batch sizes that a search tries where none are given."""

import keras_tuner

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.errors import InputError
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.training.data.forms import gives_batches
from kbatch.training.data.training_data import TrainingData

SMALLEST, LARGEST, FEWEST_BATCHES = 16, 1024, 8


def default_batch_sizes(
    build: keras_tuner.HyperModel, data: TrainingData, *, parallel: bool
) -> tuple[int, ...]:
    """Return the powers of two from 16 to what the training data of `fit` fill eight times."""
    examples = None
    # A process that only hands trials out makes no dataset, which would take the GPU.
    if not (parallel and gives_batches(data.x)):
        examples = data.count_examples(
            lambda: BatchSizeHyperModel(build, (SMALLEST,)).build(keras_tuner.HyperParameters()),
            SMALLEST,
        )
    if examples is None:
        raise InputError(
            "The length of the training data is not known before training: give `batch_sizes`, "
            "such as `kbatch.powers_of_two(16, 1024)`, or a dataset that knows its length "
            "(`tf.data.experimental.assert_cardinality`). "
            f"Received: batch_sizes=None, x of type {type(data.x).__name__}."
        )
    if examples < FEWEST_BATCHES * SMALLEST:
        raise InputError(
            f"The training data fill a batch of {SMALLEST} fewer than {FEWEST_BATCHES} times: give "
            f"`batch_sizes`. Received: batch_sizes=None for {examples} examples."
        )
    return powers_of_two(SMALLEST, min(LARGEST, examples // FEWEST_BATCHES))
