"""The limits of the batch size, which of them binds, and a size to start a search with."""

# Defaults of `kbatch.recommend`, which the command line reads without TensorFlow.
BASE_BATCH_SIZE = 32
BUDGET_S = 30.0
