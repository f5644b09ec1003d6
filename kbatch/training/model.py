"""What decides how a model trains, and train steps of kbatch in the place of Keras's."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.device.failures import ran_out_of_memory
from kbatch.errors import InputTypeError
from kbatch.library_internals import build_symbolically, compiling, layers_of, scaled_losses
from kbatch.training.data.forms import row_count


def check_compiled(model: Any) -> None:
    if type(model).__module__.startswith("tf_keras."):
        raise InputTypeError(
            "`model` is a model of `tf_keras`, which is Keras 2: build it with `import keras`, "
            "and unset the variable TF_USE_LEGACY_KERAS if you build it with `tf.keras`. "
            f"Received: a {type(model).__module__}.{type(model).__name__}."
        )
    if not isinstance(model, keras.Model):
        raise InputTypeError(
            "`model` must be a compiled `keras.Model`: does the build function end with "
            f"`return model`? Received: model={model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "The model must be compiled: call `model.compile(optimizer, loss)` first. "
            f"Received: model={model.name!r}."
        )


def check_model(model: keras.Model) -> None:
    """Check that kbatch can make the updates of a model."""
    check_compiled(model)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer already accumulates over `fit` batches: leave out "
            "`gradient_accumulation_steps`, kbatch cuts each batch instead. Received: "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}."
        )
    losses: list[Any] = keras.tree.flatten(model.loss)
    unreduced = any(getattr(loss, "reduction", "sum") in (None, "none") for loss in losses)
    if unreduced and user_step(model) is None:
        raise ValueError(
            "A loss with `reduction=None` is one value a row, and training minimises a single "
            "one: give the loss another reduction. Received: reduction=None."
        )


def replica_count(model: Any) -> int:
    """Return on how many devices a model trains at once."""
    return model.distribute_strategy.num_replicas_in_sync


def batch_norms(model: Any) -> list[Any]:
    return [one for one in layers_of(model) if isinstance(one, keras.layers.BatchNormalization)]


class ModelFacts:
    """What decides how a search trains a model, read once when it is built."""

    def __init__(self, model: Any):
        self.replicas: int = replica_count(model)
        self.dtype_policy: str = model.dtype_policy.name
        self.loss_scaled: bool = loss_scaled(model)
        self.own_step: bool = user_step(model) is not None
        #: The batch size in the shapes of its inputs, if it is made for one.
        self.declared_rows: int | None = next(
            (one.shape[0] for one in getattr(model, "inputs", None) or () if one.shape[0]), None
        )
        how = accumulation_of(model)
        self.cut_by_user = how if how is not None and how.by_user else None

    def rows(self, batch_size: int) -> int:
        """Return the examples that each replica has of a batch, at most."""
        return -(-batch_size // self.replicas)


def loss_scaled(model: keras.Model) -> bool:
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def check_trainable(model: keras.Model) -> None:
    check_model(model)
    if model.optimizer is None and user_step(model) is None:
        raise ValueError(
            "The model has no optimizer: name one in `compile`, with its learning rate. "
            f"Received: model={model.name!r}, optimizer=None."
        )
    if model.built and not model.trainable_weights:
        raise ValueError(
            "The model has no trainable weights: unfreeze a layer before training. "
            f"Received: model={model.name!r}."
        )


def build_ahead(model: Any, spec: Any) -> None:
    """Build what the first step would from the shapes of a batch, if they are known."""
    # A step that makes variables, such as those of metrics, is traced twice. One of the user's own
    # is traced, and not run.
    specs, step = tf.nest.flatten(spec), user_step(model)
    known = all(isinstance(one, tf.TensorSpec) and one.shape.rank is not None for one in specs)
    if (known or step is not None) and not model.run_eagerly:
        try:
            with model.distribute_strategy.scope():
                if step is None:
                    build_symbolically(model, spec)
                elif not tf.distribute.has_strategy():
                    with scaled_losses(model.optimizer) as scaled:
                        tf.function(step, autograph=False).get_concrete_function(spec)
                    model.scales_loss = bool(scaled)
                    # Without a `call` it is never built to Keras, which then saves no weights.
                    model.built = model.built or type(model).call is keras.Model.call
        except Exception as error:
            # What else is raised here, the step raises as well, or it does not matter to it. Where
            # memory ran out the optimizer is half built, and the step would fail of that.
            if ran_out_of_memory(error):
                raise


class TrainStep:
    """A train step in the place of Keras's, which waits for its data."""

    # At the end of data of unknown length, such as rebatched ones, Keras runs its compiled step
    # once more, with none: the optimizer counts an update and decays the weights all the same.
    def __init__(self, model: keras.Model):
        self.model: Any = model
        before, step = vars(model).get("train_step"), installed_step(model)
        # A step that the user bound to the model, not one of its class.
        self.bound: Any = before if step is None else step.bound
        # What `accumulate_gradients` was given holds for each step that takes its place.
        self.loss_denominator: Any = step and step.loss_denominator
        # Is called before the step until it returns True: Keras may build layers by a batch.
        self.prepare: Callable[[], bool] | None = step and step.prepare
        # Examples of the batches that XLA compiles, a variable; None if XLA compiles none.
        self.full_rows: Any = step and step.full_rows

    def install(self) -> keras.Model:
        """Let the model train by this step, and return the model."""
        self.model.train_step = self.run
        # Keras keeps the function that it built from the train step before.
        self.model.train_function = None
        return self.model

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch, as the step in whose place it is does."""
        if self.prepare is not None and self.prepare():
            self.prepare = None
        tensors = tf.nest.flatten(data, expand_composites=True)
        waits = tf.control_dependencies([one for one in tensors if one is not None])
        with tf.variable_creator_scope(_created_at_once), waits:
            return compiled_if_full(self._update, data, self.full_rows, self.model)

    def _update(self, data: Any) -> dict[str, Any]:
        step = user_step(self.model)
        return keras.Model.train_step(self.model, data) if step is None else step(data)


def _created_at_once(create: Callable[..., Any], **arguments: Any) -> Any:
    """Create a variable, such as those of an optimizer, without waiting for data."""
    # Else TensorFlow could not initialise it before the step, and would make a graph for the first
    # batch and another for later ones, in which `tf.random` draws the same numbers again.
    with tf.control_dependencies(None):
        return create(**arguments)


def set_xla(model: Any, chosen: bool | None = None) -> None:
    """Let XLA compile Keras's train step for full batches only, if it compiles the step.

    The last batch of an epoch has another shape at each batch size. The number of examples of a
    full batch is `full_rows` of the step.

    Args:
        model: A compiled model.
        chosen: Whether XLA compiles a model whose `jit_compile` is "auto". If None, Keras chooses.
    """
    if replica_count(model) > 1 or model.run_eagerly or user_step(model) is not None:
        return
    if chosen is not None and getattr(model, "chooses_xla", False):
        model.jit_compile = chosen
    if not model.jit_compile:
        return
    step = installed_step(model)
    step = TrainStep(model) if step is None else copy.copy(step)
    with tf.init_scope(), tf.device("CPU:0"):
        step.full_rows = tf.Variable(tf.constant(0), trainable=False)
    model.jit_compile = False
    step.install()


def compiled_if_full(
    step: Callable[[Any], Any], data: Any, full_rows: Any, model: Any
) -> dict[str, Any]:
    """Run a step on a batch, compiled by XLA if the batch has `full_rows` examples."""
    if full_rows is None:
        return step(data)

    def by_xla(data: Any) -> Any:
        with compiling(model):
            return step(data)

    compiled = tf.function(by_xla, jit_compile=True, autograph=False)
    full: Any = tf.equal(row_count(data), full_rows)
    return tf.cond(full, lambda: compiled(data), lambda: step(data))


def is_compiled(model: Any) -> bool:
    """Return whether XLA compiles the train step of a model, for some batches at least."""
    return bool(model.jit_compile) or getattr(installed_step(model), "full_rows", None) is not None


def installed_step(model: Any) -> Any:
    """Return the object behind the train step that kbatch gave a model, None without one."""
    step = getattr(vars(model).get("train_step"), "__self__", None)
    return step if isinstance(step, TrainStep) else None


def accumulation_of(model: Any) -> Any:
    """Return the `Accumulation` of a model, None if it has none: a copy by Keras is a plain one."""
    return getattr(installed_step(model), "how", None)


def user_step(model: Any) -> Callable[[Any], Any] | None:
    """Return the `train_step` of the user's own, of the class or the model, else None."""
    step = installed_step(model)
    bound = vars(model).get("train_step") if step is None else step.bound
    kind = type(model).train_step
    return kind.__get__(model) if bound is None and kind is not keras.Model.train_step else bound


def uninstall_step(model: Any) -> None:
    """Let a model train by its own step again, the user's or Keras's."""
    step = installed_step(model)
    if step is not None:
        del model.train_step
        if step.bound is not None:
            model.train_step = step.bound
        model.train_function = None


def can_validate(model: Any) -> bool:
    """Return whether a model can be evaluated: Keras's test step needs a `call` and a loss."""
    kind, stock = type(model), keras.Model
    has_loss = model.loss is not None or kind.compute_loss is not stock.compute_loss
    own = user_step(model) is None or kind.test_step is not stock.test_step
    return own or (has_loss and kind.call is not stock.call)


@contextlib.contextmanager
def waiting_for_data(model: Any, dataset: tf.data.Dataset) -> Iterator[None]:
    """Make Keras's or the user's train step wait for its data, whose length is not known."""
    known = dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY
    if known or installed_step(model) is not None:  # Those of kbatch wait.
        yield
        return
    TrainStep(model).install()
    try:
        yield
    finally:
        uninstall_step(model)


def optimizers_of(model: Any) -> list[Any]:
    """List the optimizers that a model or a part of it has as attributes, or in one of them."""
    # The RMSprop that `compile` makes where it is given none comes last, unless it is built.
    held: list[Any] = [getattr(model, "optimizer", None)]
    for part in [] if model is None else layers_of(model):
        for value in vars(part).values():
            held.append(value)
            if isinstance(value, (list, tuple, dict)):
                held += value.values() if isinstance(value, dict) else value
    found = _with_held([one for one in held if isinstance(one, keras.optimizers.Optimizer)])
    default = type(getattr(held[0], "inner_optimizer", held[0])) is keras.optimizers.RMSprop
    return sorted(found, key=lambda one: (not one.built, default and one is held[0]))


def training_optimizers(model: Any) -> list[Any]:
    """List the optimizers that train a model; a part of it, such as a teacher, may have another."""
    own = getattr(model, "optimizer", None)
    if model is None or user_step(model) is None:
        return [] if own is None else [own]
    parts = layers_of(model, include_self=False)
    of_parts = [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
    known = _with_held(of_parts)
    others = [one for one in optimizers_of(model) if all(one is not part for part in known)]
    return others or of_parts


def inner_optimizers(model: Any) -> list[Any]:
    """List those that make updates; the first one stands for a model in records."""
    # A loss scale, or one of the user's own that shares variables among several, makes none.
    stock = keras.optimizers.Optimizer.update_step
    found = _with_held(training_optimizers(model))
    return [o for o in found if type(o).update_step is not stock or len(_with_held([o])) == 1]


def _with_held(optimizers: list[Any]) -> list[Any]:
    """List optimizers, each once, and those that they have as attributes or in one of them."""
    found = list({id(one): one for one in optimizers}.values())
    for optimizer in found:
        for one in keras.tree.flatten(list(vars(optimizer).values())):
            if isinstance(one, keras.optimizers.Optimizer) and all(one is not o for o in found):
                found.append(one)
    return found


def updates_made(model: Any, batches: int = 0) -> int:
    """Count what a model's optimizers did not skip, the most of them; without any, `batches`."""
    counts: list[Any] = [
        keras.ops.convert_to_numpy(one.iterations)
        for one in _with_held(training_optimizers(model))
        if one.built
    ]
    return max(map(int, counts), default=batches)
