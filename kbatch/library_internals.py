"""Access to private parts of Keras, keras-tuner and TensorFlow, all in one file.

Each assumption about a library has one function and one test. If a new version of a library changes
such a part, the failing test shows which one.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask as mask_of
from keras.src.backend.common.masking import set_keras_mask as set_mask
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters import is_grain_dataset
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from keras.src.trainers.trainer import model_supports_jit
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from keras.src.utils.tracking import Tracker
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context, record
from tensorflow.python.framework import random_seed
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops

__all__ = [
    "ArrayDataAdapter",
    "Tracker",
    "class_weight_to_sample_weights",
    "is_op_determinism_enabled",
    "make_class_weight_map_fn",
    "mask_of",
    "model_supports_jit",
    "set_mask",
    "squeeze_or_expand_to_same_rank",
    "train_validation_split",
]


# Private attributes, and functions of TensorFlow that are not public.

lambda_output_shape: Any = attrgetter("_output_shape")  # The argument of a `Lambda` layer.
batch_norm_axes: Any = attrgetter("_reduction_axes")  # The axes of its mean and variance.
compile_loss_of: Any = attrgetter("_compile_loss")  # None without a loss in `compile`.
loss_tracker_of: Any = attrgetter("_loss_tracker")  # The metric of the mean loss of an epoch.
own_losses: Any = methodcaller("_get_own_losses")  # Losses that the layer itself added.
rate_of: Any = attrgetter("_learning_rate")  # A variable, a schedule or a function.
trained_variables: Any = attrgetter("_trainable_variables")  # Those of a built optimizer.
is_recorded: Any = record.should_record_backprop  # Whether a `GradientTape` records tensors.
stopped_tapes: Any = record.stop_recording  # A context in which no tape records operations.
watched_variables: Any = record.VariableWatcher  # Collects trainable variables that are read.
calls_in_graph: Any = attrgetter("_inbound_nodes")  # The calls of a layer on symbolic inputs.
inputs_of_dataset: Any = methodcaller("_inputs")  # The datasets that a dataset is made from.
profiles_batches: Any = attrgetter("_should_trace")  # Whether a `TensorBoard` profiles batches.
# The structures of a functional model's symbolic inputs and outputs.
structures_of: Any = attrgetter("_inputs_struct", "_outputs_struct")
# For a symbolic tensor: its operation, the number of the call, and the number of the output.
history_of: Any = attrgetter("_keras_history")


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of objects, classes or modules, and restore them afterwards."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


# Layers and models.


def layers_of(part: Any, *, include_self: bool = True) -> list[Any]:
    return list(part._flatten_layers(include_self=include_self))


def declared_structure(model: Any) -> Any:
    """Return the structure of a functional model's inputs. Other models have none."""
    return getattr(model, "_inputs_struct", None)


def calls_in(model: Any) -> list[tuple[Any, int, Any, Any]] | None:
    """List the calls in the graph of a functional model. For other models, return None.

    Each call is an operation, the number of the call among all calls of this operation, and the
    arguments.
    """
    if not hasattr(model, "_nodes_by_depth"):
        return None
    nodes_of_model = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    return [
        (operation, number, node.arguments.args, node.arguments.kwargs)
        for operation in model.operations
        for number, node in enumerate(operation._inbound_nodes)
        if id(node) in nodes_of_model
    ]


@functools.cache
def bookkeeping_names() -> frozenset[str]:
    """Return the names of the attributes that Keras sets on each layer and functional model."""
    inputs: Any = keras.Input((1,), name="x")  # A name keeps Keras's counter of names unchanged.
    layer = keras.layers.Identity(name="y")
    return frozenset({*vars(layer), *vars(keras.Model(inputs, layer(inputs), name="z"))})


def forward(model: Any, x: Any, *, training: bool) -> Any:
    """Call a model as Keras's train step does. Its `call` may have no argument `training`."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def build_symbolically(model: Any, batch: Any) -> None:
    """Build weights, metrics and losses without running the model."""
    symbols = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name), batch
    )
    with tf.init_scope():
        model._symbolic_build(data_batch=symbols)


@contextlib.contextmanager
def auto_jit_models() -> Iterator[list[Any]]:
    """Collect models that are compiled with `jit_compile="auto"`, which no attribute shows."""
    models: list[Any] = []
    plain = keras.Model.compile
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def recording_compile(model: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(model, *args, **kwargs).arguments
        models[:] = [other for other in models if other is not model]
        models.extend([model] if arguments.get("jit_compile", "auto") == "auto" else [])
        plain(model, *args, **kwargs)

    # Replace it in the class that defines it: Keras does not compile a loaded model whose class
    # overrides `compile`.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    with replaced([(owner, "compile", recording_compile)]):
        yield models


def compiling(model: Any) -> AbstractContextManager[None]:
    """Set `model.jit_compile` within the block, and let Dropout drop the same units as without XLA.

    XLA makes a random float from the highest bits of a random integer, and TensorFlow makes it from
    the lowest 23 bits. Within the block, XLA uses the lowest bits too.
    """
    plain = random_ops.stateless_random_uniform_v2

    def uniform(shape: Any, key: Any, counter: Any, alg: Any, dtype: Any, name: Any = None) -> Any:
        if dtype != tf.float32:
            return plain(shape, key, counter, alg, dtype, name)
        state = {"key": key, "counter": counter, "alg": tf.random.Algorithm.PHILOX.value}
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(shape=shape, dtype=tf.uint32, **state)
        mantissa = tf.bitwise.bitwise_and(bits, tf.constant(0x7FFFFF, tf.uint32))
        exponent = tf.constant(0x3F800000, tf.uint32)  # The bits of 1.0.
        return tf.bitcast(tf.bitwise.bitwise_or(mantissa, exponent), tf.float32) - 1.0

    return replaced(
        [(model, "_jit_compile", True), (random_ops, "stateless_random_uniform_v2", uniform)]
    )


def validation_steps(model: Any) -> int | None:
    """Return the steps per execution of the validation in `fit`. Before the first, return None."""
    iterator = getattr(model, "_eval_epoch_iterator", None)
    return None if iterator is None else int(iterator.steps_per_execution)


def holds_variables(layer: Any) -> bool:
    """Return whether a layer itself has variables, not only its inner layers."""
    return bool(layer._trainable_variables or layer._non_trainable_variables)


def replaced_layer_calls(
    call: Callable[..., Any], *, kind: Any = keras.Layer
) -> AbstractContextManager[None]:
    """Run `call(layer, plain, ...)` instead of each call of a layer, which is `plain(...)`."""
    plain = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(plain, self), *args, **kwargs)

    return replaced([(kind, "__call__", called)])


def layers_in_float32(layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Make built layers compute in float32. Their variables keep their types."""
    return replaced((layer, "_dtype_policy", keras.DTypePolicy("float32")) for layer in layers)


def batch_norm_moments(layer: Any, observe: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let `observe(moments, inputs, mask)` compute the moments of a BatchNormalization."""
    return replaced([(layer, "_moments", functools.partial(observe, layer._moments))])


# Losses and metrics.


def output_losses_of(model: Any) -> list[Any]:
    """List the built losses of the outputs, each with `.loss` and `.name`."""
    return list(getattr(model._compile_loss, "_flat_losses", None) or [])


def routed_losses(compile_loss: Any, route: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace each output's loss by `route(index, loss, y_true, y_pred, sample_weight)`.

    Keras still assigns targets to outputs as in training. Within the block it does not update the
    metrics of the single losses, because they would be averages over micro-batches.
    """
    if compile_loss is None or not compile_loss.built:
        return contextlib.nullcontext()
    routed = [
        entry._replace(loss=functools.partial(route, index, entry.loss))
        for index, entry in enumerate(compile_loss._flat_losses)
    ]
    none = [None] * len(routed)
    return replaced([(compile_loss, "_flat_losses", routed), (compile_loss, "_metrics", none)])


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Compute the loss of a batch as Keras's train step does."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


@contextlib.contextmanager
def overridden_losses(model: Any, losses: list[Any]) -> Iterator[None]:
    """Make `model.losses` return these losses, which may be those of an earlier call."""
    model._losses_override.extend(losses)
    try:
        yield
    finally:
        model._losses_override.clear()


def aggregated_loss(model: Any, loss: Any) -> Any:
    """Reduce a loss that a layer added to a scalar, as Keras does."""
    return model._aggregate_additional_loss(loss)


def set_added(layer: Any, losses: Sequence[Any]) -> None:
    """Replace the losses that a layer and its inner layers have added."""
    layer._clear_losses()
    layer._losses.extend(losses)


def loss_arguments(loss: Any) -> dict[str, Any]:
    """Return the keyword arguments that a Keras loss passes to its function."""
    return getattr(loss, "_fn_kwargs", {})


def metrics_by_name(model: Any) -> dict[str, Any]:
    """Return the metrics of a built model by their names in the results of a step."""
    named: dict[str, Any] = {}
    for metric in model.metrics:
        if metric is not getattr(model, "_compile_metrics", None):
            named[metric.name] = metric
        elif metric.built:  # `result` gives the names. Each metric returns itself as its value.
            metrics = metric.metrics
            with replaced((m, "result", functools.partial(lambda m: m, m)) for m in metrics):
                named |= metric.result()
    return named


def metric_functions(model: Any, around: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Replace each metric function of the user by `around(metric, function)`."""
    compiled = model._compile_metrics
    metrics = [] if compiled is None else compiled.metrics
    wrapped = [m for m in metrics if isinstance(m, keras.metrics.MeanMetricWrapper)]
    return replaced((metric, "_fn", around(metric, metric._fn)) for metric in wrapped)


def metrics_in_float32(model: Any) -> None:
    """Give metrics their predictions in float32: top-k does not support half precision."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return
    update_state = compiled.update_state

    def wide(tensor: Any) -> Any:
        if getattr(tensor, "dtype", None) not in (tf.float16, tf.bfloat16):
            return tensor
        cast: Any = tf.cast(tensor, tf.float32)
        set_mask(cast, mask_of(tensor))
        return cast

    compiled.update_state = lambda y, y_pred, sample_weight=None: update_state(
        y, keras.tree.map_structure(wide, y_pred), sample_weight
    )


def compile_arguments(model: Any) -> dict[str, Any]:
    return dict(model._compile_config.config) if model.compiled else {}


# Optimizers.


def excluded_from_decay(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """List the indices of variables that `exclude_from_weight_decay` excludes."""
    return [n for n, variable in enumerate(variables) if not optimizer._use_weight_decay(variable)]


def replaced_applies(apply: Callable[[Any, Any, Any], None]) -> AbstractContextManager[None]:
    """Call `apply(optimizer, gradients, variables)` whenever an optimizer would apply gradients."""

    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        apply(self, grads, trainable_variables)

    # Overrides are replaced too. Otherwise one that calls `super().apply` would run twice: now, and
    # when the collected gradients are applied.
    kinds: list[Any] = [BaseOptimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return replaced((kind, "apply", applied) for kind in kinds if "apply" in vars(kind))


@contextlib.contextmanager
def scaled_losses(optimizer: Any) -> Iterator[list[Any]]:
    """Collect the losses that an optimizer scales within the block."""
    losses: list[Any] = []

    def scale(loss: Any) -> Any:
        losses.append(loss)
        return type(optimizer).scale_loss(optimizer, loss)

    with replaced([(optimizer, "scale_loss", scale)]):
        yield losses


# Random numbers.


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Restore the random states of Keras and TensorFlow afterwards."""
    # TensorFlow draws the seeds of its operations from a Python generator.
    tensorflow: Any = context.context()
    numbers = getattr(tensorflow, "_rng", None)
    seed, drawn = tensorflow._seed, None if numbers is None else numbers.getstate()
    keras_seed = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    generator: Any = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    state = None if generator is None else np.array(generator.state.value)
    try:
        yield
    finally:
        if tensorflow._seed != seed:
            tensorflow._set_global_seed(seed)
        if drawn is not None:
            tensorflow._rng.setstate(drawn)
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, keras_seed)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(state)


@contextlib.contextmanager
def kept_kernels(wanted: Callable[[], bool]) -> Iterator[None]:
    """Keep TensorFlow's cached kernels while `wanted()` is True and no operation took a seed.

    TensorFlow clears this cache when a seed is set or a session is cleared, so that random
    operations start again. After that, preparing a traced train step takes as long as an epoch of a
    small model.
    """
    drawn, seeds_of, clear = False, random_seed.get_seed, context.pywrap_tfe.TFE_ContextClearCaches

    def watched(op_seed: Any) -> Any:
        nonlocal drawn
        drawn = True
        return seeds_of(op_seed)

    def clear_if_needed(handle: Any) -> None:
        if drawn or not wanted():
            clear(handle)

    seeds = (random_seed, "get_seed", watched)
    with replaced([seeds, (context.pywrap_tfe, "TFE_ContextClearCaches", clear_if_needed)]):
        yield


@contextlib.contextmanager
def without_retracing_advice() -> Iterator[None]:
    """Drop TensorFlow's warning about frequent tracing: a search traces a step for each size."""

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    log = logging.getLogger("tensorflow")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def replaced_draws(around: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """Replace Keras's functions that draw random numbers by `around(name, function)`."""
    names = ("normal", "uniform", "truncated_normal", "randint", "dropout")
    draws = [(name, getattr(keras_random, name)) for name in names]
    return replaced((keras_random, name, around(name, draw)) for name, draw in draws)


def state_variables(model: Any) -> list[Any]:
    """List the variables, without weights, that a call of a model may change, such as seeds.

    They include the state of the generator that layers without a seed share, once it has drawn.
    """
    layers = layers_of(model)
    weights = {id(variable) for layer in layers for variable in layer._trainable_variables}
    variables = [*model.variables, *(v for layer in layers for v in layer.metrics_variables)]
    generator: Any = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    shared = [] if generator is None else [generator.state]
    return [*{id(v): v for v in variables if id(v) not in weights}.values(), *shared]


# Data.


def dataset_of_grain(data: Any) -> Any:
    """Convert a Grain dataset to a TensorFlow one, as Keras does. Return other data unchanged."""
    if not is_grain_dataset(data):
        return data
    with contextlib.suppress(TypeError):  # A `DataLoader` has no length.
        count = len(data)
        if count < sys.maxsize:  # A dataset that repeats has this length.
            length = tf.data.experimental.assert_cardinality(count)
            return GrainDatasetAdapter(data).get_tf_dataset().apply(length)
    return GrainDatasetAdapter(data).get_tf_dataset()


def cache_file(dataset: Any) -> str | None:
    """Return the file of a dataset's cache, "" if it is in memory, None if it is no cache."""
    is_cache = type(dataset).__name__ == "CacheDataset"
    return dataset._filename.numpy().decode() if is_cache else None


def dataset_function(dataset: Any) -> Any:
    """Return the user's function of a `map` or `filter` stage. Other stages have none."""
    traced = getattr(dataset, "_map_func", None) or getattr(dataset, "_predicate", None)
    return getattr(traced, "_func", None)


def dataset_graph(dataset: Any) -> Any:
    """Return the graph of the function of a `map` or similar stage. Other stages have none."""
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    return None if function is None else function.graph


def dataset_argument(dataset: Any, name: str) -> Any:
    """Return an argument of a method of `tf.data.Dataset`, such as `batch_size` of `batch`."""
    return getattr(dataset, f"_{name}")


# The device.


def has_started_devices() -> bool:
    """Return whether TensorFlow has started its devices. Any public function would start them."""
    running: Any = context.context()
    return bool(running._initialized)


def fail_at_once_without_memory() -> None:
    """Make a GPU fail at once if memory runs out, unless TensorFlow has started its devices.

    By default TensorFlow waits 10 s for other operations to free memory. When XLA tries kernels,
    TensorFlow waits for each kernel: two minutes for a model of three layers. On a CPU, TensorFlow
    2.21 still waits if it uses its BFC allocator, and never waits if it does not.
    """
    running: Any = context.context()
    if not running._initialized:
        running._config = running._config or config_pb2.ConfigProto()
        running._config.gpu_options.experimental.disallow_retry_on_allocation_failure = True


def local_devices() -> Any:
    """Start TensorFlow's devices and list them, with their descriptions and memory limits.

    The settings of the running context must be used. With other settings TensorFlow raises an error
    or returns a device that runs nothing.
    """
    running: Any = context.context()
    running.ensure_initialized()
    return device_lib.list_local_devices(running.config)


# keras-tuner, which only a search imports.


def is_oracle_elsewhere() -> bool:
    """Return whether the oracle is in another process, the chief."""
    from keras_tuner.src.distribute.utils import has_chief_oracle

    return has_chief_oracle()


def project_directory(oracle: Any) -> Path:
    """Return the folder of an oracle's files. The oracle's own property would create it."""
    return Path(oracle._directory, oracle._project_name)


def move_project(tuner: Any, folder: Path) -> None:
    """Set another folder for the files of a tuner and its oracle."""
    tuner.directory, tuner.project_name = str(folder.parent), folder.name
    tuner.oracle._set_project_dir(tuner.directory, tuner.project_name)


def trial_metrics(results: Any, objective: Any) -> dict[str, Any]:
    """Check and convert the return value of `fit` of a HyperModel, as keras-tuner does."""
    from keras_tuner.src.engine import tuner_utils

    tuner_utils.validate_trial_results(results, objective, "fit()")
    return tuner_utils.convert_to_metrics_dict(results, objective) or {}


def trial_callbacks(tuner: Any, trial: Any, callbacks: Any, execution: int) -> list[Any]:
    """Copy callbacks for an execution of a trial, and add the one that reports epochs to a tuner.

    keras-tuner sets the folders of the copies.
    """
    from keras_tuner.src.engine.tuner_utils import TunerCallback

    copies = tuner._deepcopy_callbacks(callbacks)
    tuner._configure_tensorboard_dir(copies, trial, execution)
    return [*copies, TunerCallback(tuner, trial)]


def built_by(tuner: Any, build: Callable[[], Any]) -> Any:
    """Build a model as a tuner does, with its distribution strategy and compile arguments."""
    from keras_tuner.src.engine.tuner import maybe_distribute

    with maybe_distribute(tuner.distribution_strategy):
        model = build()
        tuner._override_compile_args(model)
    return model


def build_again(tuner: Any, hp: Any) -> Any:
    """Build the model of a trial once more, as its tuner does before it trains."""
    return tuner._build_hypermodel(hp)


def keep_build_config(tuner: Any, trial_id: str, model: Any) -> None:
    """Write the build configuration of a trial's model, which `load_model` reads."""
    from keras_tuner.src import utils

    utils.save_json(tuner._get_build_config_fname(trial_id), model.get_build_config())
