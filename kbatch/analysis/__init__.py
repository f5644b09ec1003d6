"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.efficiency import (
    best_batch_size,
    best_measured_batch_size,
    goodput,
    statistical_efficiency,
)
from kbatch.analysis.intervals import Interval, mean_interval
from kbatch.analysis.latency import Latency, fit_latency
from kbatch.analysis.latency_batches import (
    BatchAnswer,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    knee_batch_size,
)
from kbatch.analysis.learning_rate_records import LearningRateScaling, learning_rate_scaling
from kbatch.analysis.learning_rates import scale_learning_rate
from kbatch.analysis.moments import GradientMoments, gradient_moments
from kbatch.analysis.noise_scale import (
    NoiseScale,
    gradient_noise_scale,
    noise_scale_of_epochs,
    noise_scale_of_runs,
)
from kbatch.analysis.quantile_bounds import (
    QuantileBound,
    calls_for_quantile,
    quantile_upper_bound,
)
from kbatch.analysis.ratio import Ratio
from kbatch.analysis.step_time import StepTime, fit_step_time
from kbatch.analysis.steps_to_target import StepsToTarget, fit_steps_to_target
from kbatch.analysis.timescales import scale_beta_2

__all__ = [
    "BatchAnswer",
    "GradientMoments",
    "Interval",
    "Latency",
    "LearningRateScaling",
    "NoiseScale",
    "QuantileBound",
    "Ratio",
    "StepTime",
    "StepsToTarget",
    "batch_size_within",
    "best_batch_size",
    "best_measured_batch_size",
    "calls_for_quantile",
    "efficient_batch_size",
    "fastest_batch_size",
    "fit_latency",
    "fit_step_time",
    "fit_steps_to_target",
    "goodput",
    "gradient_moments",
    "gradient_noise_scale",
    "knee_batch_size",
    "learning_rate_scaling",
    "mean_interval",
    "noise_scale_of_epochs",
    "noise_scale_of_runs",
    "powers_of_two",
    "quantile_upper_bound",
    "scale_beta_2",
    "scale_learning_rate",
    "statistical_efficiency",
]
