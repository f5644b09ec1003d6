"""One recommendation: which batch size to train with, and which limit binds."""

# Defaults of `kbatch.recommend`, which the command line reads without TensorFlow.
BASE_BATCH_SIZE = 32
BUDGET_S = 60.0
