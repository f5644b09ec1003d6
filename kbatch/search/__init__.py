"""Run a search over batch sizes."""

# The default `batch_size` of `fit`, for which most learning rates were chosen.
BASE_BATCH_SIZE = 32
