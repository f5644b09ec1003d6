"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.learning_rates import scale_learning_rate

__all__ = ["powers_of_two", "scale_learning_rate"]
