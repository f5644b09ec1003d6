"""Make a compiled model accumulate gradients over micro-batches."""

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
    """How a model accumulates: the arguments of `accumulate_gradients`, which describes them."""

    micro_batch_size: int
    loss_denominator: LossDenominators = None
    moments_every: int = 0
    exact: bool = False
    by_user: bool = False  # Whether the build function set it. Then a search does not change it.

    def apply(self, model: keras.Model) -> keras.Model:
        """Make a model accumulate in this way. Parts are not compared with the whole batch."""
        stateful = [layer.name for layer in layers_of(model) if getattr(layer, "stateful", False)]
        if stateful:
            raise ValueError(
                "Layers must not be stateful, because micro-batches would mix the states of rows: "
                f"build them with `stateful=False`. Received: {stateful[0]} with stateful=True."
            )
        if self.exact:
            check_exact(model, self.loss_denominator, self.moments_every)
            return ExactTrainStep(model, self).install()
        if user_step(model) is not None:  # The denominator of its loss is unknown.
            raise InputError(
                "kbatch cannot split batches for a custom `train_step`: remove it and compute the "
                "loss in `compute_loss`, or call `kbatch.accumulate_gradients(model, "
                "micro_batch_size, exact=True)` in the build function. "
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

    kbatch replaces the model's train step by one that sends `micro_batch_size` examples at a time
    through the model, sums their gradients and applies the sum once. `fit`, callbacks, metrics,
    schedules and saved files do not change. The batch size is the number of examples per update.
    The micro-batch size is the number of examples in memory at once.

    Example:

    >>> model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> kbatch.accumulate_gradients(model, micro_batch_size=32)
    >>> model.fit(x, y, batch_size=1024)  # 1024 examples per update, 32 in memory

    The loss of each output has the same denominator as in Keras: the number of returned values or
    valid tokens, or the sum of weights. kbatch treats a scalar of `add_loss`, of a loss function or
    of a custom `compute_loss` as a mean over the rows. If a loss function divides by another
    number, such as the tokens of its own mask, give `loss_denominator`.

    The first `fit` or `train_on_batch` with batches to cut compares up to 16 rows in parts with the
    same rows as one batch, in float32 and without dropout. It warns if a loss term or the gradient
    of a variable differs by more than 0.01 %. It also warns of metric functions that return one
    value for all rows, because they become means over micro-batches. It does not check other rows,
    a loss that changes later, or a custom training loop. Metrics that a custom `compute_metrics`
    adds are not reported.

    If the model has a custom `train_step`, move its loss into `compute_loss`, or use `exact=True`.

    With `exact=True` the train step, Keras's or yours, runs on the whole batch, as contrastive
    losses, correlations and GANs require. Only its calls of layers are cut. First, the outputs of
    all micro-batches are computed. For the gradient, each micro-batch goes through the layer again,
    with the same draws of `keras.random`, and backpropagates its part (Gao et al. 2021,
    arXiv:2101.06983). This costs one more forward pass, and three times the memory of the outputs
    of the whole batch. Each row of an output must depend on that row only, so BatchNormalization is
    not exact. A loss that a layer adds counts as a mean. No rows are compared.

    Args:
        model: A compiled model. It is changed.
        micro_batch_size: Integer. Examples in a micro-batch. The last micro-batch of a batch may be
            smaller. All examples have the same weight.
        exact: Boolean. Whether the train step runs on the whole batch. It cannot be combined with
            `moments_every`, `loss_denominator` or several replicas. A layer that draws with
            `tf.random` raises an error in training. Default: False.
        loss_denominator: Function `(y_true, y_pred) -> scalar` that returns the denominator of the
            loss of these rows, or a dict of such functions by output name. If None, the model keeps
            the function that it already has, or uses the denominators described above. Ignored
            for a loss with `reduction="sum"`. Default: None.
        moments_every: Integer. Measure the two moments of the gradient noise scale every this many
            updates, beginning with the first of an epoch. The logs have their means over the epoch
            as `gradient_variance` (tr(Sigma)) and `gradient_squared_norm` (|G|^2). 8 costs about
            3 % of the time, 0 measures nothing. With several replicas nothing is measured.
            Default: 0.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not a Keras model, `micro_batch_size` or `moments_every` is not an
            integer, or `exact` is not a bool.
        ValueError: If `micro_batch_size` is not positive or `moments_every` is negative; if the
            model is not compiled, has an optimizer that already accumulates, or has a custom
            `train_step` and `exact` is False; if `loss_denominator` is not a function, or does not
            return a scalar in training; if `exact` is combined with an argument listed above.
        tf.errors.InvalidArgumentError: In training, if `loss_denominator` is not positive over a
            batch. XLA does not check this.
    """
    check_model(model)
    check_denominators(loss_denominator, model)
    if not isinstance(exact, bool):
        raise TypeError(f"`exact` must be True or False. Received: exact={exact!r}.")
    size = check_size(micro_batch_size, "micro_batch_size")
    if not is_integer(moments_every) or moments_every < 0:
        kind = ValueError if is_integer(moments_every) else TypeError
        raise kind(
            "`moments_every` must be an integer of at least 0. Gradient noise is measured once in "
            f"`moments_every` updates, or never if it is 0. Received: {moments_every=}."
        )
    Accumulation(size, loss_denominator, int(moments_every), exact, by_user=True).apply(model)
    if not exact:
        check_at_first_training(model)
    return model
