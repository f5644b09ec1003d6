"""Gradient accumulation for a compiled model, and what couples the rows of a batch.

BatchNormalization normalises by the statistics of the rows it is given, and some losses compare
the rows of a batch with each other: cut into micro-batches they compute something else, which
no weighting repairs.
"""

import dataclasses
import warnings
from typing import NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.document.numbers import format_number
from kbatch.library_internals import layers_of
from kbatch.records.notes import RunNote
from kbatch.training.accumulation.exact import ExactTrainStep
from kbatch.training.accumulation.train_step import AccumulatingTrainStep
from kbatch.training.model import check_model, installed_step


class Accumulation(NamedTuple):
    """What `accumulate_gradients` was asked for."""

    micro_batch_size: int
    moments_every: int
    batch_norm_once: bool
    exact: bool = False

    def apply(self, model: keras.Model) -> keras.Model:
        """Make another model accumulate in the same way, and return it."""
        return accumulate_gradients(model, **self._asdict())


def accumulation_of(model: keras.Model) -> Accumulation | None:
    """Return how a model accumulates, None if it does not: a copy by Keras is a plain one."""
    step = _step_of(model)
    if step is None:
        return None
    return Accumulation(step.micro_batch_size, step.moments_every, step.batch_norm_once, step.exact)


def varying_micro_batch(model: keras.Model) -> tf.Variable:
    """Let the micro-batch size of a model change from step to step, without tracing again.

    XLA compiles for one size: it does not allow that.
    """
    step = _step_of(model)
    if step is None or model.jit_compile:
        raise ValueError(
            "A micro-batch size can vary in a model that accumulates and is not compiled by XLA: "
            "call `accumulate_gradients` first, with `jit_compile=False`. "
            f"Received: jit_compile={model.jit_compile}, accumulates={step is not None}."
        )
    with tf.device("CPU:0"):  # Loops are counted there.
        size = tf.constant(step.micro_batch_size, tf.int32)
        step.varying_size = tf.Variable(size, trainable=False)
    return step.varying_size


def accumulate_gradients(
    model: keras.Model,
    micro_batch_size: int,
    *,
    exact: bool = False,
    moments_every: int = 0,
    batch_norm_once: bool = True,
) -> keras.Model:
    """Make a compiled model train on large batches in micro-batches.

    The model's train step is replaced by one that sends `micro_batch_size` examples at a time
    through the model, sums their gradients and applies them once. `fit`, callbacks, metrics,
    schedules and saved files stay as they are: batch size is how many examples make an update,
    micro-batch size is how many need memory at once.

    Example:

    >>> model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> kbatch.accumulate_gradients(model, micro_batch_size=32)
    >>> model.fit(x, y, batch_size=1024)  # 1024 examples an update, 32 in memory

    Each output's loss is divided by what Keras divides it by: the values that it returned, valid
    tokens or weights. A scalar from `add_loss`, from a loss function or from a `compute_loss` of
    your own is taken to be a mean over the rows. Layers that look at other rows, custom losses that
    compare rows and masks that dropout draws again are not equal to the whole batch; metrics that a
    `compute_metrics` of your own adds to its result are not reported.

    A `train_step` of your own runs on each micro-batch; what it hands to its optimizers, weighed by
    rows, is applied at the end. That equals the whole batch where its loss is a mean over rows and
    it reads no weights that it has updated, as a GAN does. It measures no moments.

    With `exact=True` the loss and the metrics are those of the whole batch, whatever rows they
    compare: contrastive, ranking by pairs, a correlation. Outputs of all micro-batches come first;
    then each goes through again, with the same draws of `keras.random`, and gets its part of the
    loss's gradient by the outputs (Gao et al. 2021, arXiv:2101.06983). That costs a forward pass
    and the memory of the outputs of the whole batch, three times. An output's row must depend on
    that row alone, so BatchNormalization is not exact; a loss that a layer adds counts as a mean.

    Args:
        model: A compiled model. It is changed.
        micro_batch_size: Examples in a micro-batch. A batch that it does not divide ends in a
            smaller one, and each example keeps its weight.
        exact: Whether the loss is computed on the whole batch. On one device, and without
            `moments_every`; draws by `tf.random` in a layer are refused, in training.
        moments_every: Every how many updates, from the first of an epoch on, to measure the two
            moments behind the gradient noise scale, reported as `gradient_variance` (tr(Sigma))
            and `gradient_squared_norm` (|G|^2), means over the epoch; 0 for never. Every eighth
            costs about 3 %. Not under a strategy of several replicas.
        batch_norm_once: Whether the moving statistics of BatchNormalization advance once an
            update, by the statistics of the whole batch, instead of once a micro-batch.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is no Keras model or `micro_batch_size` is no integer.
        ValueError: If `micro_batch_size` is not positive, or the model is not compiled, has no
            trainable weights or an optimizer that already accumulates; or if `exact` meets what it
            does not go with.
    """
    check_model(model)
    size = check_size(micro_batch_size, "micro_batch_size")
    parts = coupled_parts(model)
    if exact:
        parts = tuple(part for part in parts if not part.endswith("(loss)"))
    if parts:
        warnings.warn(coupling_note(parts), stacklevel=2)
    stateful = [layer.name for layer in layers_of(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise ValueError(
            "A stateful layer keeps one state a row, which micro-batches would mix: build it with "
            f"`stateful=False`. Received: {stateful[0]} with stateful=True."
        )
    kind = ExactTrainStep if exact else AccumulatingTrainStep
    return kind(model, size, moments_every=moments_every, batch_norm_once=batch_norm_once).install()


def _step_of(model: keras.Model) -> AccumulatingTrainStep | None:
    step = installed_step(model)
    return step if isinstance(step, AccumulatingTrainStep) else None


# In float32 sums in another order differ by some 1e-6.
EQUAL_UP_TO = 1e-4


@dataclasses.dataclass(frozen=True)
class PartsCheck:
    """Whether the parts of a batch add up to the whole: its loss terms and its gradient.

    Attributes:
        difference: Largest difference of a loss term, over its size; where none of them differs,
            of a variable's gradient, over its norm. None where it could not be computed.
        where: The loss term or variable that differs most, None without a difference.
        reason: Why it could not be computed, else None.
        rows: Examples of each batch that was compared.
        exact_difference: As `difference`, where the parts go through in the exact mode; None
            where parts do not differ without it, or where it could not be computed.
    """

    difference: float | None
    where: str | None
    reason: str | None
    rows: int
    exact_difference: float | None = None

    def __post_init__(self):
        if (self.difference is None) == (self.reason is None):
            raise ValueError(
                "A check has a `difference`, or a `reason` why it has none. "
                f"Received: difference={self.difference}, reason={self.reason!r}."
            )

    @property
    def equal(self) -> bool:
        """Whether parts were seen to train as the whole does."""
        return self.difference is not None and self.difference <= EQUAL_UP_TO

    @property
    def repaired(self) -> bool:
        """Whether parts were seen to train as the whole does in the exact mode alone."""
        return self.exact_difference is not None and self.exact_difference <= EQUAL_UP_TO


_COUPLED_LAYERS = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
# Losses of Keras that relate the rows of a batch: ratios of sums over all of it, or pairs.
_COUPLED_LOSSES = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)


def coupled_parts(model: keras.Model) -> tuple[str, ...]:
    """Name the layers and losses of a model that cannot be cut by rows.

    A layer that the model calls with `training=False` is named too, which types do not tell: a
    functional model calls it in training all the same, one with a `call` of its own does not.
    """
    layers = [
        f"{layer.name} ({type(layer).__name__})"
        for layer in layers_of(model, include_self=False)
        if isinstance(layer, _COUPLED_LAYERS) and layer.trainable
    ]
    kinds = {kind.__name__.lower() for kind in _COUPLED_LOSSES}
    losses = set()
    for loss in keras.tree.flatten(model.loss):
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
        if isinstance(loss, _COUPLED_LOSSES):
            losses.add(type(loss).__name__)
        elif name.lower() in kinds:
            losses.add(name)
    return (*layers, *(f"{name} (loss)" for name in sorted(losses)))


def coupling_note(parts: tuple[str, ...]) -> RunNote:
    """Describe in a sentence what the coupled parts mean for the result."""
    normalized = any(part.endswith("(BatchNormalization)") for part in parts)
    code = "batch_normalization_in_parts" if normalized else "coupled_parts"
    return RunNote.of(code, parts=", ".join(parts))


def check_note(check: PartsCheck) -> RunNote:
    """Say in a sentence what a check that did not pass means for a batch that is cut."""
    code = "parts_not_compared" if check.difference is None else "parts_differ"
    return RunNote.of(code, found=check_text(check))


def check_text(check: PartsCheck) -> str:
    """Say what a check that did not pass found."""
    if check.difference is None:
        return f"no comparison with parts of it could be made ({check.reason})"
    percent = format_number(100 * check.difference, 2)
    return f"{check.where} differed by {percent} % in a comparison on {check.rows} examples"
