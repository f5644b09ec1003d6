"""The limits of the batch size, which of them binds, and a size to start a search with."""

# The default of `kbatch.recommend`, which the command line reads without TensorFlow.
BUDGET_S = 30.0
