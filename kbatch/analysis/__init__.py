"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import powers_of_two as powers_of_two
from kbatch.analysis.goodput import StepsToTarget as StepsToTarget
from kbatch.analysis.goodput import fit_steps_to_target as fit_steps_to_target
from kbatch.analysis.goodput import goodput as goodput
from kbatch.analysis.goodput import statistical_efficiency as statistical_efficiency
from kbatch.analysis.intervals import Estimate as Estimate
from kbatch.analysis.intervals import calls_for_quantile as calls_for_quantile
from kbatch.analysis.intervals import mean_interval as mean_interval
from kbatch.analysis.intervals import quantile_upper_bound as quantile_upper_bound
from kbatch.analysis.learning_rate import LearningRateScaling as LearningRateScaling
from kbatch.analysis.learning_rate import learning_rate_scaling as learning_rate_scaling
from kbatch.analysis.learning_rate import scale_beta_2 as scale_beta_2
from kbatch.analysis.learning_rate import scale_learning_rate as scale_learning_rate
from kbatch.analysis.noise_scale import gradient_moments as gradient_moments
from kbatch.analysis.noise_scale import gradient_noise_scale as gradient_noise_scale
from kbatch.analysis.noise_scale import noise_scale_of_epochs as noise_scale_of_epochs
from kbatch.analysis.noise_scale import noise_scale_of_runs as noise_scale_of_runs
from kbatch.analysis.scaling_curve import Latency as Latency
from kbatch.analysis.scaling_curve import batch_size_within as batch_size_within
from kbatch.analysis.scaling_curve import efficient_batch_size as efficient_batch_size
from kbatch.analysis.scaling_curve import fastest_batch_size as fastest_batch_size
from kbatch.analysis.scaling_curve import fit_latency as fit_latency
from kbatch.analysis.scaling_curve import knee_batch_size as knee_batch_size
