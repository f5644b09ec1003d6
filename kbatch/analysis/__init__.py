"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.goodput import (
    StepsToTarget,
    best_batch_size,
    best_measured_batch_size,
    fit_steps_to_target,
    goodput,
    statistical_efficiency,
)
from kbatch.analysis.intervals import (
    Interval,
    QuantileBound,
    Ratio,
    calls_for_quantile,
    mean_interval,
    quantile_upper_bound,
)
from kbatch.analysis.learning_rate import (
    LearningRateScaling,
    learning_rate_scaling,
    scale_beta_2,
    scale_learning_rate,
)
from kbatch.analysis.line_fit import StepTime, fit_step_time
from kbatch.analysis.noise_scale import (
    GradientMoments,
    NoiseScale,
    gradient_moments,
    gradient_noise_scale,
    noise_scale_of_epochs,
    noise_scale_of_runs,
)
from kbatch.analysis.scaling_curve import (
    BatchAnswer,
    Latency,
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    knee_batch_size,
)

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
