"""What kbatch uses of the private parts of Keras, keras-tuner and TensorFlow, all in one file.

One function for each assumption, and a test of each: where a new version of a library moves such
a part, the test that fails says which one.
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
    "class_weight_to_sample_weights",
    "is_op_determinism_enabled",
    "make_class_weight_map_fn",
    "model_supports_jit",
    "squeeze_or_expand_to_same_rank",
    "train_validation_split",
]


# Private attributes, and functions of TensorFlow that are not public.

lambda_output_shape: Any = attrgetter("_output_shape")  # As a `Lambda` layer was given it.
batch_norm_axes: Any = attrgetter("_reduction_axes")  # Over which a layer takes moments.
compile_loss_of: Any = attrgetter("_compile_loss")  # None without a loss in `compile`.
loss_tracker_of: Any = attrgetter("_loss_tracker")  # The metric of the mean loss of an epoch.
added_by: Any = methodcaller("_get_own_losses")  # Not of layers within it.
rate_of: Any = attrgetter("_learning_rate")  # A variable, a schedule or a function.
trained_by: Any = attrgetter("_trainable_variables")  # What an optimizer was built for.
is_recorded: Any = record.should_record_backprop  # Whether a tape follows tensors.
stopped_tapes: Any = record.stop_recording  # Within, no tape keeps what is computed.
watched_variables: Any = record.VariableWatcher  # The trainable ones that are read within.
calls_in_graph: Any = attrgetter("_inbound_nodes")  # Of a layer on symbolic inputs.
inputs_of_dataset: Any = methodcaller("_inputs")  # The datasets that a dataset is made from.
profiles_batches: Any = attrgetter("_should_trace")  # Of a `TensorBoard`.
# Of a functional model the structures of its symbolic inputs and outputs; of a symbolic tensor the
# operation that made it, which call of it that was, and the number of its output.
structures_of: Any = attrgetter("_inputs_struct", "_outputs_struct")
history_of: Any = attrgetter("_keras_history")


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let attributes of objects, classes or modules have other values, and put them back."""
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
    """Return a functional model's inputs in the structure it was made with, else None."""
    return getattr(model, "_inputs_struct", None)


def calls_in(model: Any) -> list[tuple[Any, int, Any, Any]] | None:
    """List the calls in the graph of a functional model. For other models, return None.

    Each is an operation, the number of that call among all of it, and its arguments.
    """
    if not hasattr(model, "_nodes_by_depth"):
        return None
    own = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    return [
        (one, number, node.arguments.args, node.arguments.kwargs)
        for one in model.operations
        for number, node in enumerate(one._inbound_nodes)
        if id(node) in own
    ]


@functools.cache
def bookkeeping_names() -> frozenset[str]:
    """Return the names of the attributes that Keras gives to each layer and functional model."""
    inputs: Any = keras.Input((1,), name="x")  # A name of its own lets Keras count up none.
    layer = keras.layers.Identity(name="y")
    return frozenset({*vars(layer), *vars(keras.Model(inputs, layer(inputs), name="z"))})


def is_tracker(value: Any) -> bool:
    """Return whether a value is what Keras finds variables by, in a layer, metric or optimizer."""
    return isinstance(value, Tracker)


def forward(model: Any, x: Any, *, training: bool) -> Any:
    """Call a model as Keras's train step does: its `call` may have no argument `training`."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def build_symbolically(model: Any, batch: Any) -> None:
    """Build weights, metrics and losses, without running the model."""
    symbols = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name), batch
    )
    with tf.init_scope():
        model._symbolic_build(data_batch=symbols)


@contextlib.contextmanager
def left_to_keras() -> Iterator[list[Any]]:
    """List the models that are compiled with `jit_compile="auto"` within: no attribute shows it."""
    found: list[Any] = []
    plain = keras.Model.compile
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def compile_noted(model: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(model, *args, **kwargs).arguments
        found[:] = [one for one in found if one is not model]
        found.extend([model] if given.get("jit_compile", "auto") == "auto" else [])
        plain(model, *args, **kwargs)

    # On the class that defines it: Keras does not compile a loaded model whose class overrides it.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    with replaced([(owner, "compile", compile_noted)]):
        yield found


def compiling(model: Any) -> AbstractContextManager[None]:
    """Let `model.jit_compile` say that XLA compiles what is traced within, and Dropout draw alike.

    XLA makes other numbers from 0 to 1 of the same random bits: of the highest bits of each, where
    TensorFlow takes the lowest 23.
    """
    plain = random_ops.stateless_random_uniform_v2

    def uniform(shape: Any, key: Any, counter: Any, alg: Any, dtype: Any, name: Any = None) -> Any:
        if dtype != tf.float32:
            return plain(shape, key, counter, alg, dtype, name)
        given = {"key": key, "counter": counter, "alg": tf.random.Algorithm.PHILOX.value}
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(shape=shape, dtype=tf.uint32, **given)
        mantissa = tf.bitwise.bitwise_and(bits, tf.constant(0x7FFFFF, tf.uint32))
        exponent = tf.constant(0x3F800000, tf.uint32)  # Of numbers from 1 to 2.
        return tf.bitcast(tf.bitwise.bitwise_or(mantissa, exponent), tf.float32) - 1.0

    return replaced(
        [(model, "_jit_compile", True), (random_ops, "stateless_random_uniform_v2", uniform)]
    )


def validation_steps(model: Any) -> int | None:
    """Return the steps of an execution by which `fit` validates, None before it does."""
    opened = getattr(model, "_eval_epoch_iterator", None)
    return None if opened is None else int(opened.steps_per_execution)


def holds_variables(layer: Any) -> bool:
    """Return whether a layer has variables itself, not only in layers within it."""
    return bool(layer._trainable_variables or layer._non_trainable_variables)


def mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    tensor._keras_mask = mask


def replaced_layer_calls(
    call: Callable[..., Any], *, kind: Any = keras.Layer
) -> AbstractContextManager[None]:
    """Let `call(layer, plain, ...)` stand in for calls of layers; `plain(...)` makes one."""
    plain = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(plain, self), *args, **kwargs)

    return replaced([(kind, "__call__", called)])


def layers_in_float32(layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Let built layers compute in float32; their variables stay as they are."""
    return replaced((layer, "_dtype_policy", keras.DTypePolicy("float32")) for layer in layers)


def batch_norm_moments(layer: Any, observe: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let `observe(moments, inputs, mask)` stand in for how a BatchNormalization takes moments."""
    return replaced([(layer, "_moments", functools.partial(observe, layer._moments))])


# Losses and metrics.


def output_losses_of(model: Any) -> list[Any]:
    """List the losses of the outputs, each with `.loss` and `.name`; none before they are built."""
    return list(getattr(model._compile_loss, "_flat_losses", None) or [])


def routed_losses(compile_loss: Any, route: Callable[..., Any]) -> AbstractContextManager[None]:
    """Send each output's loss through `route(index, loss, y_true, y_pred, sample_weight)`.

    Keras matches structures and paths of outputs as it does in training; its trackers of the
    single losses are left out, since they would count micro-batches.
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
    """Let `model.losses` be those of a certain call, which may not have been the last one."""
    model._losses_override.extend(losses)
    try:
        yield
    finally:
        model._losses_override.clear()


def aggregated_loss(model: Any, loss: Any) -> Any:
    """Reduce a loss that a layer added to the scalar that Keras trains on."""
    return model._aggregate_additional_loss(loss)


def set_added(layer: Any, losses: Sequence[Any]) -> None:
    """Replace the losses that a layer and those in it have added."""
    layer._clear_losses()
    layer._losses.extend(losses)


def loss_arguments(loss: Any) -> dict[str, Any]:
    """Return the keyword arguments that one of Keras's losses hands to its function."""
    return getattr(loss, "_fn_kwargs", {})


def metrics_by_name(model: Any) -> dict[str, Any]:
    """Return the metrics of a built model by the names that a step returns their results by."""
    found: dict[str, Any] = {}
    for metric in model.metrics:
        if metric is getattr(model, "_compile_metrics", None):
            if metric.built:  # It names them where it computes them.
                named = [
                    (one, "result", functools.partial(lambda m: m, one)) for one in metric.metrics
                ]
                with replaced(named):
                    found |= metric.result()
        else:
            found[metric.name] = metric
    return found


def metric_functions(model: Any, around: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Let `around(metric, function)` stand in for each function that was given as a metric."""
    compiled = model._compile_metrics
    metrics = [] if compiled is None else compiled.metrics
    wrapped = [one for one in metrics if isinstance(one, keras.metrics.MeanMetricWrapper)]
    return replaced((metric, "_fn", around(metric, metric._fn)) for metric in wrapped)


def metrics_in_float32(model: Any) -> None:
    """Let metrics see predictions in float32: top-k has no operation on halves."""
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
    """List which of the variables `exclude_from_weight_decay` names; no configuration shows it."""
    keys = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return [
        number
        for number, one in enumerate(variables)
        if optimizer._var_key(one) in keys or (pattern and pattern.search(one.name))
    ]


def replaced_applies(apply: Callable[[Any, Any, Any], None]) -> AbstractContextManager[None]:
    """Let `apply(optimizer, gradients, variables)` stand in for how optimizers apply gradients."""

    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        apply(self, grads, trainable_variables)

    # An override that calls `super().apply` would run here, and again for what was collected.
    kinds: list[Any] = [BaseOptimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return replaced((kind, "apply", applied) for kind in kinds if "apply" in vars(kind))


@contextlib.contextmanager
def scaled_losses(optimizer: Any) -> Iterator[list[Any]]:
    """List the losses that an optimizer is asked to scale."""
    losses: list[Any] = []

    def scale(loss: Any) -> Any:
        losses.append(loss)
        return type(optimizer).scale_loss(optimizer, loss)

    with replaced([(optimizer, "scale_loss", scale)]):
        yield losses


# Random numbers.


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Put the random numbers of Keras and TensorFlow back where they were."""
    # TensorFlow numbers its operations by draws from a generator of its own.
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
    """Keep what TensorFlow has made ready to run, as long as that is wanted and nothing draws.

    With each seed that is set and each session that is cleared TensorFlow forgets all of it, so
    that operations that draw by their place begin again. To make a train step ready once more, from
    its traced graph, takes as long as an epoch of a small model.
    """
    drawn, seeds_of, clear = False, random_seed.get_seed, context.pywrap_tfe.TFE_ContextClearCaches

    def watched(op_seed: Any) -> Any:
        nonlocal drawn
        drawn = True
        return seeds_of(op_seed)

    def clear_where_needed(handle: Any) -> None:
        if drawn or not wanted():
            clear(handle)

    seeds = (random_seed, "get_seed", watched)
    with replaced([seeds, (context.pywrap_tfe, "TFE_ContextClearCaches", clear_where_needed)]):
        yield


@contextlib.contextmanager
def without_retracing_advice() -> Iterator[None]:
    """Drop TensorFlow's warning about a function that is often traced again.

    A search traces the train step once for each batch size and calls it a few times only, which
    TensorFlow takes for a mistake.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    log = logging.getLogger("tensorflow")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def replaced_draws(around: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """Let `around(name, function)` stand in for the functions by which Keras draws."""
    names = ("normal", "uniform", "truncated_normal", "randint", "dropout")
    draws = [(name, getattr(keras_random, name)) for name in names]
    return replaced((keras_random, name, around(name, draw)) for name, draw in draws)


def state_variables(model: Any) -> list[Any]:
    """List what a model's layers write in a call, such as seeds; weights are left out, frozen too.

    Keras's own generator, which draws where a layer has none, is among them once it has drawn.
    """
    weights = {id(one) for layer in layers_of(model) for one in layer._trainable_variables}
    generator: Any = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    shared = [] if generator is None else [generator.state]
    metrics = [one for layer in layers_of(model) for one in layer.metrics_variables]
    found = {id(one): one for one in (*model.variables, *metrics) if id(one) not in weights}
    return [*found.values(), *shared]


# Data.


def dataset_of_grain(data: Any) -> Any:
    """Return a Grain dataset as Keras reads it on TensorFlow; anything else as it is."""
    if not is_grain_dataset(data):
        return data
    with contextlib.suppress(TypeError):  # A `DataLoader` has no length.
        count = len(data)
        if count < sys.maxsize:  # Else it repeats.
            length = tf.data.experimental.assert_cardinality(count)
            return GrainDatasetAdapter(data).get_tf_dataset().apply(length)
    return GrainDatasetAdapter(data).get_tf_dataset()


def cache_file(dataset: Any) -> str | None:
    """Return the file of a dataset's cache, empty in memory; None where it is no cache."""
    is_cache = type(dataset).__name__ == "CacheDataset"
    return dataset._filename.numpy().decode() if is_cache else None


def dataset_function(dataset: Any) -> Any:
    """Return the function of a map or filter as the person wrote it, None if it has none."""
    traced = getattr(dataset, "_map_func", None) or getattr(dataset, "_predicate", None)
    return getattr(traced, "_func", None)


def dataset_graph(dataset: Any) -> Any:
    """Return the graph of the function of a map or the like, None if it has none."""
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    return None if function is None else function.graph


def dataset_argument(dataset: Any, name: str) -> Any:
    """Return what a method of `tf.data.Dataset` was given, such as `batch_size` of `batch`."""
    return getattr(dataset, f"_{name}")


# The device.


def has_started_devices() -> bool:
    """Return whether TensorFlow has started its devices: any public name would start them."""
    running: Any = context.context()
    return bool(running._initialized)


def fail_at_once_without_memory() -> None:
    """Let a GPU say at once that its memory is out, unless TensorFlow has started it already.

    By default it waits 10 s for other operations to free some, and where XLA tries its kernels it
    does so for each of them: two minutes for a net of three layers. A CPU with TensorFlow's BFC
    allocator waits anyway (2.21); without it, a CPU never waits.
    """
    running: Any = context.context()
    if not running._initialized:
        running._config = running._config or config_pb2.ConfigProto()
        running._config.gpu_options.experimental.disallow_retry_on_allocation_failure = True


def local_devices() -> Any:
    """List TensorFlow's devices, started, with their descriptions and the limits of memory.

    They are read with the settings of the running context: under other ones TensorFlow refuses to
    number the visible GPUs again, or gives a device that nothing runs on.
    """
    running: Any = context.context()
    running.ensure_initialized()
    return device_lib.list_local_devices(running.config)


# keras-tuner, which is imported by whoever searches.


def is_oracle_elsewhere() -> bool:
    """Return whether a chief process has the oracle."""
    from keras_tuner.src.distribute.utils import has_chief_oracle

    return has_chief_oracle()


def project_directory(oracle: Any) -> Path:
    """Return where an oracle keeps its files; its own property would make that folder again."""
    return Path(oracle._directory, oracle._project_name)


def move_project(tuner: Any, folder: Path) -> None:
    """Let a tuner and its oracle keep their files in another folder."""
    tuner.directory, tuner.project_name = str(folder.parent), folder.name
    tuner.oracle._set_project_dir(tuner.directory, tuner.project_name)


def trial_metrics(results: Any, objective: Any) -> dict[str, Any]:
    """Check what building and fitting returned, and convert it as keras-tuner does."""
    from keras_tuner.src.engine import tuner_utils

    tuner_utils.validate_trial_results(results, objective, "fit()")
    return tuner_utils.convert_to_metrics_dict(results, objective) or {}


def trial_callbacks(tuner: Any, trial: Any, callbacks: Any, execution: int) -> list[Any]:
    """Copy callbacks for an execution of a trial, each writing where keras-tuner sends it."""
    copies = tuner._deepcopy_callbacks(callbacks)
    tuner._configure_tensorboard_dir(copies, trial, execution)
    return copies


def tuner_callback(tuner: Any, trial: Any) -> Any:
    """Make the callback by which keras-tuner follows the training of a trial."""
    from keras_tuner.src.engine.tuner_utils import TunerCallback

    return TunerCallback(tuner, trial)


def built_by(tuner: Any, build: Callable[[], Any]) -> Any:
    """Build a model as a tuner does: under its strategy, and compiled with what it was given."""
    from keras_tuner.src.engine.tuner import maybe_distribute

    with maybe_distribute(tuner.distribution_strategy):
        model = build()
        tuner._override_compile_args(model)
    return model


def build_again(tuner: Any, hp: Any) -> Any:
    """Build the model of a trial once more, as its tuner does before it trains."""
    return tuner._build_hypermodel(hp)


def keep_build_config(tuner: Any, trial_id: str, model: Any) -> None:
    """Write what `load_model` builds the layers of a trial's model by."""
    from keras_tuner.src import utils

    utils.save_json(tuner._get_build_config_fname(trial_id), model.get_build_config())
