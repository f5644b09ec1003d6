"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import check_batch_sizes, powers_of_two
from kbatch.analysis.intervals import Interval, mean_interval
from kbatch.analysis.learning_rates import learning_rate_ratio, scale_learning_rate
from kbatch.analysis.throughput import Throughput, throughput_of_windows

__all__ = [
    "Interval",
    "Throughput",
    "check_batch_sizes",
    "learning_rate_ratio",
    "mean_interval",
    "powers_of_two",
    "scale_learning_rate",
    "throughput_of_windows",
]
