# The public names and the modules that define them, as in `_HOME_OF` of `__init__.py`.
from kbatch import analysis as analysis
from kbatch.analysis.batch_sizes import powers_of_two as powers_of_two
from kbatch.analysis.learning_rate import scale_learning_rate as scale_learning_rate
from kbatch.cli.arguments import quiet_start as quiet_start
from kbatch.device.gpu_monitor import GpuMonitor as GpuMonitor
from kbatch.errors import OutOfMemoryError as OutOfMemoryError
from kbatch.inference.figures import plot_inference_memory as plot_inference_memory
from kbatch.inference.figures import (
    plot_inference_operating_curve as plot_inference_operating_curve,
)
from kbatch.inference.figures import plot_inference_throughput as plot_inference_throughput
from kbatch.inference.measure import profile_inference as profile_inference
from kbatch.inference.result import InferenceProfile as InferenceProfile
from kbatch.input_pipeline.figure import plot_input_pipeline as plot_input_pipeline
from kbatch.input_pipeline.measure import profile_input_pipeline as profile_input_pipeline
from kbatch.input_pipeline.result import InputPipelineProfile as InputPipelineProfile
from kbatch.memory.figure import plot_memory as plot_memory
from kbatch.memory.find import find_max_batch_size as find_max_batch_size
from kbatch.memory.result import MaxBatchSizeResult as MaxBatchSizeResult
from kbatch.recommendation.figure import plot_limits as plot_limits
from kbatch.recommendation.measure import recommend as recommend
from kbatch.recommendation.result import Recommendation as Recommendation
from kbatch.report import write_report as write_report
from kbatch.search.executors import ray_executor as ray_executor
from kbatch.search.hypermodel import BatchSizeHyperModel as BatchSizeHyperModel
from kbatch.search.live_plot import LivePlot as LivePlot
from kbatch.search.tuner import BatchSizeTuner as BatchSizeTuner
from kbatch.study.comparison import Comparison as Comparison
from kbatch.study.comparison import compare as compare
from kbatch.study.figures.efficiency import plot_noise_scale as plot_noise_scale
from kbatch.study.figures.efficiency import plot_time_to_target as plot_time_to_target
from kbatch.study.figures.quality import plot_learning_curves as plot_learning_curves
from kbatch.study.figures.quality import plot_learning_rates as plot_learning_rates
from kbatch.study.figures.quality import plot_pareto as plot_pareto
from kbatch.study.figures.timelines import plot_gpu_timeline as plot_gpu_timeline
from kbatch.study.figures.timelines import plot_search as plot_search
from kbatch.study.figures.trials import plot_trials as plot_trials
from kbatch.study.study import Study as Study
from kbatch.study.study import load_study as load_study
from kbatch.throughput.figure import plot_training_profile as plot_training_profile
from kbatch.throughput.measure import profile_training as profile_training
from kbatch.throughput.result import TrainingProfile as TrainingProfile
from kbatch.training.accumulation import accumulate_gradients as accumulate_gradients
from kbatch.training.callbacks import StopAtTarget as StopAtTarget
from kbatch.training.callbacks import TimeBudget as TimeBudget
from kbatch.training.callbacks import UpdateBudget as UpdateBudget
from kbatch.training.data.training_data import training_dataset as training_dataset

__version__: str
