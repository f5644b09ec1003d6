"""Gradient accumulation for a compiled model."""

from typing import NamedTuple

import keras

from kbatch.analysis.batch_sizes import check_size, is_integer
from kbatch.errors import InputError
from kbatch.library_internals import layers_of
from kbatch.training.accumulation.exact import ExactTrainStep, check_exact
from kbatch.training.accumulation.output_losses import LossDenominators, check_denominators
from kbatch.training.accumulation.parts_check import check_at_first_training
from kbatch.training.accumulation.train_step import AccumulatingTrainStep
from kbatch.training.model import check_model, user_step


class Accumulation(NamedTuple):
    """How a model accumulates: the arguments of `accumulate_gradients`."""

    micro_batch_size: int
    loss_denominator: LossDenominators = None
    moments_every: int = 0
    exact: bool = False
    by_user: bool = False  # Whether who built the model asked for it: a search leaves it as it is.

    def apply(self, model: keras.Model) -> keras.Model:
        """Make a model accumulate in this way, without comparing parts with the whole."""
        stateful = [layer.name for layer in layers_of(model) if getattr(layer, "stateful", False)]
        if stateful:
            raise ValueError(
                "A stateful layer keeps one state a row, which micro-batches would mix: build it "
                f"with `stateful=False`. Received: {stateful[0]} with stateful=True."
            )
        if self.exact:
            check_exact(model, self.loss_denominator, self.moments_every)
            return ExactTrainStep(model, self).install()
        if user_step(model) is not None:  # What its loss is divided by is not known.
            raise InputError(
                "A `train_step` of your own goes through whole: to cut its batches, move the loss "
                "into `compute_loss`, which Keras's step calls, or let the build function call "
                "`kbatch.accumulate_gradients(model, micro_batch_size, exact=True)`. "
                f"Received: model of class {type(model).__name__}."
            )
        return AccumulatingTrainStep(model, self).install()


def accumulate_gradients(
    model: keras.Model,
    micro_batch_size: int,
    *,
    exact: bool = False,
    loss_denominator: LossDenominators = None,
    moments_every: int = 0,
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
    your own is taken to be a mean over the rows: where a loss function divides by something else,
    such as the tokens of a mask of its own, give `loss_denominator`.

    The first `fit` or `train_on_batch` with batches to cut sends up to 16 of 32 rows through the
    model, whole and in parts, in float32 and without dropout. It warns where a loss term or the
    gradient of a variable differs by more than 0.01 %, and of metric functions that return one
    value for all rows, which become means over micro-batches. Other rows, a loss that changes
    later, and a loop of your own are not checked. What your `compute_metrics` adds is not reported.

    A model with a `train_step` of your own is refused: move its loss into `compute_loss`, or use
    `exact=True`.

    With `exact=True` the train step, Keras's or yours, runs on the whole batch, as contrastive
    losses, correlations and GANs need, and only its calls of layers are cut. The outputs of all
    micro-batches are computed first. For a gradient each goes through the layer again, with the
    same draws of `keras.random`, and backpropagates its part (Gao et al. 2021, arXiv:2101.06983).
    The price is one forward pass, and three times the memory of the outputs of the whole batch.
    Each row of an output must depend on that row alone, so BatchNormalization is not exact. A loss
    that a layer adds counts as a mean. No rows are compared.

    Args:
        model: A compiled model. It is changed.
        micro_batch_size: Examples in a micro-batch. A batch that it does not divide ends in a
            smaller one, and each example keeps its weight.
        exact: Whether the train step runs on the whole batch. Excludes `moments_every`,
            `loss_denominator` and several replicas. A layer that draws with `tf.random` raises an
            error in training.
        loss_denominator: Function `(y_true, y_pred) -> scalar` that returns the number by which the
            loss of these rows is divided, or a dict of such functions by output name. None keeps
            the function that the model already has, or else divides as described above. Ignored
            for a loss with `reduction="sum"`.
        moments_every: Every how many updates, from the first of an epoch on, to measure the two
            moments behind the gradient noise scale, reported as `gradient_variance` (tr(Sigma))
            and `gradient_squared_norm` (|G|^2), means over the epoch; 0 for never. Every eighth
            costs about 3 %. Not under a strategy of several replicas.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is no Keras model, `micro_batch_size` or `moments_every` is no
            integer, or `exact` is no bool.
        ValueError: If `micro_batch_size` is not positive or `moments_every` negative; if the model
            is not compiled, has an optimizer that already accumulates, or a `train_step` of its own
            without `exact`; if `loss_denominator` is no function, or does not return a scalar in
            training; or if `exact` is combined with anything that it excludes, as listed above.
        tf.errors.InvalidArgumentError: In training, if `loss_denominator` is not positive over a
            batch; XLA leaves this check out.
    """
    check_model(model)
    check_denominators(loss_denominator, model)
    if not isinstance(exact, bool):
        raise TypeError(f"`exact` must be True or False. Received: exact={exact!r}.")
    size = check_size(micro_batch_size, "micro_batch_size")
    wrong = "`moments_every` must be an integer, the number of updates, or 0 for never. "
    wrong += f"Received: moments_every={moments_every!r}."
    if not is_integer(moments_every):
        raise TypeError(wrong)
    if moments_every < 0:
        raise ValueError(wrong)
    Accumulation(size, loss_denominator, int(moments_every), exact, by_user=True).apply(model)
    if not exact:
        check_at_first_training(model)
    return model
