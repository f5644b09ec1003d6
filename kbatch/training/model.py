"""Check a model, read facts of it, and replace its train step."""

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

_Optimizer = keras.optimizers.Optimizer


def check_compiled(model: Any) -> None:
    if type(model).__module__.startswith("tf_keras."):
        raise InputTypeError(
            "`model` must be a Keras 3 model: build it with `import keras`, or unset "
            "the environment variable TF_USE_LEGACY_KERAS if you build it with `tf.keras`. "
            f"Received: a {type(model).__module__}.{type(model).__name__}."
        )
    if not isinstance(model, keras.Model):
        raise InputTypeError(
            "`model` must be a compiled `keras.Model`: end the build function with "
            f"`return model`. Received: model={model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled: call `model.compile(optimizer, loss)` first. "
            f"Received: model={model.name!r}."
        )


def check_model(model: keras.Model) -> None:
    """Check that a model is compiled and that its batches can be cut into micro-batches."""
    check_compiled(model)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "kbatch cuts each batch into micro-batches, so the optimizer must not accumulate over "
            "batches: leave out `gradient_accumulation_steps`. Received: "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}."
        )
    losses: list[Any] = keras.tree.flatten(model.loss)
    unreduced = any(getattr(loss, "reduction", "sum") in (None, "none") for loss in losses)
    if unreduced and user_step(model) is None:
        raise ValueError(
            "A loss must return one value for a batch, not one for each row: give it another "
            "`reduction`. Received: reduction=None."
        )


def replica_count(model: Any) -> int:
    """Return the number of devices that a model trains on at once."""
    return model.distribute_strategy.num_replicas_in_sync


def batch_norms(model: Any) -> list[Any]:
    return [one for one in layers_of(model) if isinstance(one, keras.layers.BatchNormalization)]


class ModelFacts:
    """Facts of a model that decide how a search trains it."""

    def __init__(self, model: Any):
        self.replicas: int = replica_count(model)
        self.dtype_policy: str = model.dtype_policy.name
        self.loss_scaled: bool = loss_scaled(model)
        self.own_step: bool = user_step(model) is not None
        #: The batch size in the shapes of its inputs. None if it accepts any batch size.
        self.declared_rows: int | None = next(
            (x.shape[0] for x in getattr(model, "inputs", None) or () if x.shape[0]), None
        )
        how = accumulation_of(model)
        self.cut_by_user = how if how is not None and how.by_user else None

    def rows(self, batch_size: int) -> int:
        """Return how many examples of a batch one replica gets, at most."""
        return -(-batch_size // self.replicas)


def loss_scaled(model: keras.Model) -> bool:
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def check_trainable(model: keras.Model) -> None:
    check_model(model)
    if model.optimizer is None and user_step(model) is None:
        raise ValueError(
            "The model must have an optimizer: give one to `compile`, with its learning rate. "
            f"Received: model={model.name!r}, optimizer=None."
        )
    if model.built and not model.trainable_weights:
        raise ValueError(
            "The model must have trainable weights: unfreeze a layer before training. "
            f"Received: model={model.name!r}."
        )


def build_ahead(model: Any, spec: Any) -> None:
    """Build the variables of the first train step from the shapes of a batch, if these are known.

    Keras traces a step twice if it creates variables, for example of metrics. The user's own step
    is traced here, but does not run.
    """
    specs, step = tf.nest.flatten(spec), user_step(model)
    known = all(isinstance(part, tf.TensorSpec) and part.shape.rank is not None for part in specs)
    if (known or step is not None) and not model.run_eagerly:
        try:
            with model.distribute_strategy.scope():
                if step is None:
                    build_symbolically(model, spec)
                elif not tf.distribute.has_strategy():
                    with scaled_losses(model.optimizer) as scaled:
                        tf.function(step, autograph=False).get_concrete_function(spec)
                    model.scales_loss = bool(scaled)
                    # Keras never builds a model without a `call`, and would not save its weights.
                    model.built = model.built or type(model).call is keras.Model.call
        except Exception as error:
            # If another error matters, the train step raises it again. If memory ran out, the
            # optimizer is half built, and the step would fail with a misleading error.
            if ran_out_of_memory(error):
                raise


class TrainStep:
    """A train step that replaces Keras's and waits for its data.

    After the last batch of data of unknown length, such as rebatched data, Keras runs its compiled
    step once more without data. If the step did not wait for data, the optimizer would count an
    update and decay the weights.
    """

    def __init__(self, model: keras.Model):
        self.model: Any = model
        step = installed_step(model)
        # A step that the user has set on the model, or None if the step is a method of the class.
        self.given_step: Any = vars(model).get("train_step") if step is None else step.given_step
        # The argument of `accumulate_gradients`, which later steps of this model keep.
        self.loss_denominator: Any = step and step.loss_denominator
        # Called before each step until it returns True, because a batch may build further layers.
        self.prepare: Callable[[], bool] | None = step and step.prepare
        # A variable with the number of examples of a batch that XLA compiles. If none, None.
        self.full_rows: Any = step and step.full_rows

    def install(self) -> keras.Model:
        """Set this step on the model, and return the model."""
        self.model.train_step = self.run
        self.model.train_function = None  # Keras's function would call the previous step.
        return self.model

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch, as the replaced step does."""
        if self.prepare is not None and self.prepare():
            self.prepare = None
        tensors = tf.nest.flatten(data, expand_composites=True)
        waits = tf.control_dependencies([part for part in tensors if part is not None])

        def create(creator: Callable[..., Any], **arguments: Any) -> Any:
            # If a new variable, for example of an optimizer, waited for data, it could not be
            # initialised before the step. TensorFlow would trace one graph for the first batch and
            # another one for later batches, in which `tf.random` draws the same numbers again.
            with tf.control_dependencies(None):
                return creator(**arguments)

        with tf.variable_creator_scope(create), waits:
            return compiled_if_full(self._update, data, self.full_rows, self.model)

    def _update(self, data: Any) -> dict[str, Any]:
        step = user_step(self.model)
        return keras.Model.train_step(self.model, data) if step is None else step(data)


def limit_xla(model: Any, chosen: bool | None = None) -> None:
    """Restrict XLA to full batches, if it compiles the model's train step.

    The last batch of an epoch has another shape for each batch size, and XLA would compile the step
    for all of these shapes. The variable `full_rows` of the step says which batches are full.

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
    """Run a step on a batch. If the batch has `full_rows` examples, XLA compiles the step."""
    if full_rows is None:
        return step(data)

    def by_xla(data: Any) -> Any:
        with compiling(model):
            return step(data)

    compiled = tf.function(by_xla, jit_compile=True, autograph=False)
    full: Any = tf.equal(row_count(data), full_rows)
    return tf.cond(full, lambda: compiled(data), lambda: step(data))


def is_compiled(model: Any) -> bool:
    """Return whether XLA compiles the train step of a model, at least for full batches."""
    return bool(model.jit_compile) or getattr(installed_step(model), "full_rows", None) is not None


def installed_step(model: Any) -> Any:
    """Return the `TrainStep` that kbatch has installed in a model, or None."""
    step = getattr(vars(model).get("train_step"), "__self__", None)
    return step if isinstance(step, TrainStep) else None


def accumulation_of(model: Any) -> Any:
    """Return the `Accumulation` of a model, or None. Keras's copies of a model lose it."""
    return getattr(installed_step(model), "accumulation", None)


def user_step(model: Any) -> Callable[[Any], Any] | None:
    """Return the user's `train_step`, a method or set on the model, or None if it is Keras's."""
    step, kind = installed_step(model), type(model).train_step
    given_step = vars(model).get("train_step") if step is None else step.given_step
    if given_step is None and kind is not keras.Model.train_step:
        return kind.__get__(model)
    return given_step


def uninstall_step(model: Any) -> None:
    """Remove kbatch's step from a model, which then uses the user's or Keras's step."""
    step = installed_step(model)
    if step is not None:
        del model.train_step
        if step.given_step is not None:
            model.train_step = step.given_step
        model.train_function = None


def can_validate(model: Any) -> bool:
    """Return whether a model can be evaluated. Keras's test step needs a `call` and a loss."""
    kind, stock = type(model), keras.Model
    if user_step(model) is None or kind.test_step is not stock.test_step:
        return True
    has_loss = model.loss is not None or kind.compute_loss is not stock.compute_loss
    return has_loss and kind.call is not stock.call


@contextlib.contextmanager
def waiting_for_data(model: Any, dataset: tf.data.Dataset) -> Iterator[None]:
    """Make Keras's or the user's train step wait for a dataset of unknown length."""
    known = dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY
    if known or installed_step(model) is not None:  # kbatch's steps wait.
        yield
        return
    TrainStep(model).install()
    try:
        yield
    finally:
        uninstall_step(model)


def optimizers_of(model: Any) -> list[Any]:
    """List the optimizers in the attributes of a model and its layers, also in lists and dicts."""
    main = getattr(model, "optimizer", None)
    values: list[Any] = [main]
    for part in [] if model is None else layers_of(model):
        for value in vars(part).values():
            values.append(value)
            if isinstance(value, (list, tuple, dict)):
                values += value.values() if isinstance(value, dict) else value
    optimizers = _with_inner([value for value in values if isinstance(value, _Optimizer)])
    # `compile` without an optimizer makes an RMSprop, which comes last unless a step has built it.
    default = type(getattr(main, "inner_optimizer", main)) is keras.optimizers.RMSprop
    return sorted(optimizers, key=lambda o: (not o.built, default and o is main))


def training_optimizers(model: Any) -> list[Any]:
    """List the optimizers that train a model, but not that of an inner model such as a teacher."""
    main = getattr(model, "optimizer", None)
    if model is None or user_step(model) is None:
        return [] if main is None else [main]
    parts = layers_of(model, include_self=False)
    of_parts = [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
    known = _with_inner(of_parts)
    others = [o for o in optimizers_of(model) if all(o is not part for part in known)]
    return others or of_parts


def inner_optimizers(model: Any) -> list[Any]:
    """List the optimizers that update weights. Records describe the first one."""
    # Leave out loss scales, and custom optimizers that give the variables to several optimizers.
    stock = _Optimizer.update_step
    optimizers = _with_inner(training_optimizers(model))
    return [o for o in optimizers if type(o).update_step is not stock or len(_with_inner([o])) == 1]


def _with_inner(optimizers: list[Any]) -> list[Any]:
    """List optimizers, and the optimizers in their attributes, each once."""
    found = list({id(o): o for o in optimizers}.values())
    for optimizer in found:
        for value in keras.tree.flatten(list(vars(optimizer).values())):
            if isinstance(value, _Optimizer) and all(value is not other for other in found):
                found.append(value)
    return found


def updates_made(model: Any, batches: int = 0) -> int:
    """Return the largest update count of a model's optimizers, or `batches` if it has none."""
    built = [o.iterations for o in _with_inner(training_optimizers(model)) if o.built]
    counts: list[Any] = [keras.ops.convert_to_numpy(count) for count in built]
    return max(map(int, counts), default=batches)
