"""Pure arithmetic on batch sizes: numbers in, numbers out, no TensorFlow."""

from kbatch.analysis.batch_sizes import powers_of_two as powers_of_two
from kbatch.analysis.goodput import StepsToTarget as StepsToTarget
from kbatch.analysis.goodput import fit_steps_to_target as fit_steps_to_target
from kbatch.analysis.goodput import goodput as goodput
from kbatch.analysis.goodput import statistical_efficiency as statistical_efficiency
from kbatch.analysis.intervals import Estimate as Estimate
from kbatch.analysis.learning_rate import LearningRateScaling as LearningRateScaling
from kbatch.analysis.learning_rate import scale_beta_2 as scale_beta_2
from kbatch.analysis.learning_rate import scale_learning_rate as scale_learning_rate
from kbatch.analysis.noise_scale import gradient_noise_scale as gradient_noise_scale
