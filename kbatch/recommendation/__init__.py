"""The limits of the batch size, the limit that binds, and a size to start a search with."""

# The default of `kbatch.recommend`. The command line reads it without TensorFlow.
BUDGET_S = 30.0
