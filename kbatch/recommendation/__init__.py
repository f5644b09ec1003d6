"""The limits of the batch size, and a size to start a search with."""

# The default of `kbatch.recommend`. The command line reads it without TensorFlow.
BUDGET_S = 30.0
