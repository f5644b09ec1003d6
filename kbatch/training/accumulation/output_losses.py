"""The loss of a micro-batch as its share in the loss of the whole batch.

An output's loss over a batch is a sum of values over a denominator D: the rows, the values that
the loss returned, the valid (unmasked) entries or the sample weights, by its reduction. With D_k
the same count over micro-batch k, the parts

    D_k / D * loss_k

add up to the loss of the batch, each output with a denominator of its own. They are formed
before the loss is scaled, so that the float16 backward pass sees the values of a full batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import (
    aggregated_loss,
    compile_loss_of,
    compute_loss,
    layers_of,
    loss_arguments,
    mask_of,
    output_losses_of,
    overridden_losses,
    routed_losses,
    squeeze_or_expand_to_same_rank,
)
from kbatch.training.model import installed_step

# From (y_true, y_pred) of some rows to what their loss is divided by, or one by name of an output.
LossDenominators = Callable[[Any, Any], Any] | dict[str, Callable[[Any, Any], Any]] | None


def part_of_batch_loss(
    model: keras.Model,
    forward: tuple[Any, Any, Any, Any],
    *,
    rows_share: tf.Tensor,
    totals: Sequence[tf.Tensor],
    added_losses: list[Any],
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Compute what one micro-batch adds to the loss of the whole batch."""
    x, y, y_pred, sample_weight = forward
    compile_loss, own = compile_loss_of(model), has_own_loss(model)
    parts: dict[int, tf.Tensor] = {}

    def weigh(index: int, loss: Any, *call: Any) -> tf.Tensor:
        total = totals[index] if totals else None
        given = _given_denominator(model, index)
        share = _share(loss, call, given, rows_share=rows_share, total=total)

        value = functools.partial(loss, *call)
        if given is not None:  # A part without any token divides 0 by 0.
            value = functools.partial(tf.cond, share > 0, value, lambda: tf.zeros([], loss.dtype))
        found = tf.reduce_sum(value())  # Keras leaves an empty one as it is.
        parts[index] = found * tf.cast(share, found.dtype)
        # Terms of a loss of the user's own are taken to be means over rows, and weighed by them
        # together; those of `compile` are known better.
        return parts[index] / tf.cast(rows_share, found.dtype) if own else parts[index]

    with routed_losses(compile_loss, weigh):
        if own:
            with overridden_losses(model, added_losses):
                loss: Any = compute_loss(model, x, y, y_pred, sample_weight)
            total = loss * tf.cast(rows_share, loss.dtype)
        else:
            terms = [] if compile_loss is None else [compile_loss(y, y_pred, sample_weight)]
            for added in added_losses:
                # A scalar is weighed by the rows: a penalty on weights is the same for every
                # micro-batch, and a loss counts as a mean. Of a vector Keras sums the rows.
                value: Any = aggregated_loss(model, added)
                rows = len(added.shape) > 0
                terms.append(value if rows else value * tf.cast(rows_share, value.dtype))
            if not terms:
                raise ValueError(
                    "There is no loss to minimise: give `compile` a `loss`. Received: loss=None."
                )
            total = tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])
    return total, tuple(parts.get(i, tf.zeros([])) for i, _ in enumerate(output_losses_of(model)))


def denominators(model: keras.Model, forward: tuple[Any, Any, Any]) -> tuple[tf.Tensor, ...]:
    """Count what each output's loss is divided by, over the rows given."""
    found: dict[int, tf.Tensor] = {}

    def count(index: int, loss: Any, *call: Any) -> tf.Tensor:
        given = _given_denominator(model, index)
        counted = None if loss.reduction == "sum" else _denominator(loss, call, given)
        found[index] = tf.zeros([]) if counted is None else counted
        return tf.zeros([])

    compile_loss = compile_loss_of(model)
    with routed_losses(compile_loss, count):
        compile_loss(*forward)
    return tuple(found[index] for index in sorted(found))


def need_counting(model: keras.Model) -> bool:
    """Return whether a loss is divided by something other than the rows."""
    # By masks of layers or of a loss that ignores a class, by what a loss of the user's own
    # returns, by weights, or as given.
    losses = [entry.loss for entry in output_losses_of(model)]
    return bool(losses) and (
        any(_given_denominator(model, index) for index in range(len(losses)))
        or any(_makes_mask(layer) for layer in layers_of(model))
        or any(
            loss.reduction == "mean_with_sample_weight"
            or loss_arguments(loss).get("ignore_class") is not None
            or _may_vary(loss)
            for loss in losses
        )
    )


def check_denominators(given: LossDenominators, model: keras.Model) -> None:
    functions = list(given.values()) if isinstance(given, dict) else [given]
    usable = model.loss is not None and functions and all(map(callable, functions))
    if given is not None and not usable:
        raise ValueError(
            "`loss_denominator` must be a function `(y_true, y_pred) -> scalar`, or a dict of such "
            "functions by name of the output, for what `compile` was given as `loss`. Received: "
            f"loss_denominator={given!r}, loss={model.loss!r}."
        )


def _given_denominator(model: keras.Model, index: int) -> Callable[[Any, Any], Any] | None:
    """Return the function that the step of a model was given for one of its outputs."""
    given = getattr(installed_step(model), "loss_denominator", None)
    if not isinstance(given, dict):
        return given
    names = [entry.name or entry.loss.name for entry in output_losses_of(model)]
    if unknown := given.keys() - set(names):
        raise ValueError(
            f"`loss_denominator` names outputs that have a loss, which are {names}. "
            f"Received: loss_denominator with the names {sorted(unknown)}."
        )
    return given.get(names[index])


def _share(
    loss: Any,
    call: tuple[Any, ...],
    given: Callable[[Any, Any], Any] | None,
    *,
    rows_share: tf.Tensor,
    total: tf.Tensor | None,
) -> tf.Tensor:
    """Return D_k / D of one output."""
    if loss.reduction == "sum":
        return tf.ones([])
    counted = _denominator(loss, call, given)
    if counted is None:
        return rows_share
    if total is None:
        raise ValueError(
            "The predictions carry a mask that no layer is known to make: give the layer that sets "
            f"it a `compute_mask` method. Received: loss={loss.name!r} with a mask."
        )
    if given is None:
        return tf.math.divide_no_nan(counted, total)
    message = "`loss_denominator` must be positive over a batch."
    check = tf.debugging.assert_positive(total, message)
    with tf.control_dependencies([] if check is None else [check]):
        return counted / total


def has_own_loss(model: keras.Model) -> bool:
    """Return whether a `compute_loss` of the user's own takes the place of Keras's."""
    own_method = type(model).compute_loss is not keras.Model.compute_loss
    return own_method or "compute_loss" in vars(model)


def _denominator(
    loss: Any, call: tuple[Any, ...], given: Callable[[Any, Any], Any] | None
) -> tf.Tensor | None:
    """Count the denominator of one output, None where it is the number of rows."""
    y_true, y_pred, sample_weight = (*call, None)[:3]
    if given is not None:
        counted: Any = tf.cast(given(y_true, y_pred), tf.float32)
        if counted.shape.rank != 0:
            raise ValueError(
                "`loss_denominator` must return a scalar, by which the loss of the given rows is "
                f"divided: sum over the rows. Received: a value of shape {counted.shape}."
            )
        return counted
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return None  # A loss that is not made of values a row and a reduction.

    def as_float(value: Any) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=loss.dtype)

    # Only the mask and the shape are used; the graph drops the values.
    values: Any = loss.call(
        keras.tree.map_structure(as_float, y_true), keras.tree.map_structure(as_float, y_pred)
    )
    masks = [tf.cast(m, tf.bool) for m in map(mask_of, (y_pred, values)) if m is not None]
    mask = functools.reduce(tf.logical_and, masks) if masks else None
    if loss.reduction in ("mean", "sum_over_batch_size") or sample_weight is None:
        # A scalar is taken for a mean over rows; Keras's own losses have as many values each row.
        varies = _may_vary(loss) and values.shape.rank != 0
        if mask is None:
            return _size(values) if varies else None
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        return valid * tf.math.divide_no_nan(_size(values), _size(mask)) if varies else valid
    weights: Any = tf.cast(sample_weight, tf.float32)
    if mask is None:
        return tf.reduce_sum(weights)
    valid, weights = squeeze_or_expand_to_same_rank(tf.cast(mask, tf.float32), weights)
    return tf.reduce_sum(valid * weights)


def _size(tensor: Any) -> tf.Tensor:
    return tf.cast(tf.size(tensor), tf.float32)


def _is_from_keras(value: Any) -> bool:
    return getattr(value, "__module__", "").split(".")[0] == "keras"


def _makes_mask(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.Masking):
        return True
    if isinstance(layer, keras.layers.Embedding):
        return layer.mask_zero
    if isinstance(layer, keras.layers.Lambda):
        return layer.mask is not None
    own_mask = type(layer).compute_mask is not keras.Layer.compute_mask
    return own_mask and not _is_from_keras(type(layer))


def _may_vary(loss: Any) -> bool:
    """Return whether a loss is not Keras's own, and so may return fewer values than rows."""
    return not _is_from_keras(getattr(loss, "fn", type(loss)))
