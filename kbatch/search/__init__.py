"""Running a search over batch sizes."""

# Keras's own default: the size that most learning rates suit. The command line reads it too.
BASE_BATCH_SIZE = 32
