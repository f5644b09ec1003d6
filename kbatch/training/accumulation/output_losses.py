"""Compute the loss of a micro-batch as a part of the loss of the whole batch.

The loss of an output over a batch is a sum of values, divided by a denominator D. D is the number
of rows, of returned values or of valid (unmasked) entries, or the sum of sample weights. It depends
on the reduction of the loss. If D_k is the denominator of micro-batch k, the parts

    D_k / D * loss_k

add up to the loss of the batch. Each output has its own denominator. The parts are computed before
the loss is scaled, so that the float16 backward pass has the same values as for a full batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch import library_internals as internals
from kbatch.training.model import installed_step

# A function from (y_true, y_pred) to a denominator, or a dict of such functions by output name.
LossDenominators = Callable[[Any, Any], Any] | dict[str, Callable[[Any, Any], Any]] | None


def part_of_batch_loss(
    model: keras.Model,
    forward: tuple[Any, Any, Any, Any],
    *,
    rows_share: tf.Tensor,
    totals: Sequence[tf.Tensor],
    added_losses: list[Any],
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Compute the part of the batch's loss that one micro-batch adds."""
    x, y, y_pred, sample_weight = forward
    compile_loss, custom = internals.compile_loss_of(model), has_own_loss(model)
    parts: dict[int, tf.Tensor] = {}

    def weigh(index: int, loss: Any, *call: Any) -> tf.Tensor:
        total = totals[index] if totals else None
        denominator = _custom_denominator(model, index)
        share = _share(loss, call, denominator, rows_share=rows_share, total=total)

        value = functools.partial(loss, *call)
        if denominator is not None:  # The loss of a part without tokens would divide 0 by 0.
            value = functools.partial(tf.cond, share > 0, value, lambda: tf.zeros([], loss.dtype))
        mean = tf.reduce_sum(value())  # Keras does not reduce an empty loss to a scalar.
        parts[index] = mean * tf.cast(share, mean.dtype)
        # The whole loss of a custom `compute_loss` is weighted by rows below, so divide here.
        return parts[index] / tf.cast(rows_share, mean.dtype) if custom else parts[index]

    with internals.routed_losses(compile_loss, weigh):
        if custom:
            with internals.overridden_losses(model, added_losses):
                loss: Any = internals.compute_loss(model, x, y, y_pred, sample_weight)
            total = loss * tf.cast(rows_share, loss.dtype)
        else:
            terms = [] if compile_loss is None else [compile_loss(y, y_pred, sample_weight)]
            for added in added_losses:
                # Weight a scalar by rows, because it is a mean, or a penalty on weights that is the
                # same for each micro-batch. Keras sums the rows of a vector.
                value: Any = internals.aggregated_loss(model, added)
                rows = len(added.shape) > 0
                terms.append(value if rows else value * tf.cast(rows_share, value.dtype))
            if not terms:
                raise ValueError(
                    "The model must have a loss: give `loss` to `compile`. Received: loss=None."
                )
            total = tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])
    return total, tuple(
        parts.get(i, tf.zeros([])) for i, _ in enumerate(internals.output_losses_of(model))
    )


def denominators(model: keras.Model, forward: tuple[Any, Any, Any]) -> tuple[tf.Tensor, ...]:
    """Return the denominator of each output's loss over some rows."""
    counts: dict[int, tf.Tensor] = {}

    def count(index: int, loss: Any, *call: Any) -> tf.Tensor:
        custom = _custom_denominator(model, index)
        counted = None if loss.reduction == "sum" else _denominator(loss, call, custom)
        counts[index] = tf.zeros([]) if counted is None else counted
        return tf.zeros([])

    compile_loss = internals.compile_loss_of(model)
    with internals.routed_losses(compile_loss, count):
        compile_loss(*forward)
    return tuple(counts[index] for index in sorted(counts))


def need_counting(model: keras.Model) -> bool:
    """Return whether a loss may be divided by anything other than the number of rows."""
    # Other denominators are due to masks of layers, a loss that ignores a class, custom losses,
    # sample weights and `loss_denominator`.
    losses = [entry.loss for entry in internals.output_losses_of(model)]
    return bool(losses) and (
        any(_custom_denominator(model, index) for index in range(len(losses)))
        or any(_makes_mask(layer) for layer in internals.layers_of(model))
        or any(
            loss.reduction == "mean_with_sample_weight"
            or internals.loss_arguments(loss).get("ignore_class") is not None
            or _is_custom(loss)
            for loss in losses
        )
    )


def check_denominators(loss_denominator: LossDenominators, model: keras.Model) -> None:
    several = isinstance(loss_denominator, dict)
    functions = list(loss_denominator.values()) if several else [loss_denominator]
    usable = model.loss is not None and functions and all(map(callable, functions))
    if loss_denominator is not None and not usable:
        raise ValueError(
            "`loss_denominator` must be a function `(y_true, y_pred) -> scalar`, or a dict of such "
            "functions by output name, and requires a `loss` in `compile`. Received: "
            f"loss_denominator={loss_denominator!r}, loss={model.loss!r}."
        )


def _custom_denominator(model: keras.Model, index: int) -> Callable[[Any, Any], Any] | None:
    """Return the `loss_denominator` of one output, or None if the user gave none."""
    denominators = getattr(installed_step(model), "loss_denominator", None)
    if not isinstance(denominators, dict):
        return denominators
    names = [entry.name or entry.loss.name for entry in internals.output_losses_of(model)]
    if unknown := denominators.keys() - set(names):
        raise ValueError(
            f"The keys of `loss_denominator` must be outputs with a loss, which are {names}. "
            f"Received: loss_denominator with the names {sorted(unknown)}."
        )
    return denominators.get(names[index])


def _share(
    loss: Any,
    call: tuple[Any, ...],
    custom: Callable[[Any, Any], Any] | None,
    *,
    rows_share: tf.Tensor,
    total: tf.Tensor | None,
) -> tf.Tensor:
    """Return the share D_k / D of one output."""
    if loss.reduction == "sum":
        return tf.ones([])
    counted = _denominator(loss, call, custom)
    if counted is None:
        return rows_share
    if total is None:
        raise ValueError(
            "The predictions have a mask, but no layer has a `compute_mask` method: add one to the "
            f"layer that sets the mask. Received: loss={loss.name!r} with a mask."
        )
    if custom is None:
        return tf.math.divide_no_nan(counted, total)
    message = "The sum of `loss_denominator` over a batch must be positive"
    check = tf.debugging.assert_positive(total, message)
    with tf.control_dependencies([] if check is None else [check]):
        return counted / total


def has_own_loss(model: keras.Model) -> bool:
    """Return whether the user's `compute_loss` replaces Keras's."""
    overridden = type(model).compute_loss is not keras.Model.compute_loss
    return overridden or "compute_loss" in vars(model)


def _denominator(
    loss: Any, call: tuple[Any, ...], custom: Callable[[Any, Any], Any] | None
) -> tf.Tensor | None:
    """Return the denominator of one output, or None if it is the number of rows."""
    y_true, y_pred, sample_weight = (*call, None)[:3]
    if custom is not None:
        counted: Any = tf.cast(custom(y_true, y_pred), tf.float32)
        if counted.shape.rank != 0:
            raise ValueError(
                "`loss_denominator` must return one number for all rows together, such as a sum. "
                f"Received: a value of shape {counted.shape}."
            )
        return counted
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return None  # A custom `__call__` returns no values per row.

    def as_float(value: Any) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=loss.dtype)

    # Only the mask and the shape of the values are used, so the graph does not compute the values.
    values: Any = loss.call(
        keras.tree.map_structure(as_float, y_true), keras.tree.map_structure(as_float, y_pred)
    )
    masks = [tf.cast(m, tf.bool) for m in map(internals.mask_of, (y_pred, values)) if m is not None]
    mask = functools.reduce(tf.logical_and, masks) if masks else None
    if loss.reduction in ("mean", "sum_over_batch_size") or sample_weight is None:
        # A scalar counts as a mean over rows. Losses of Keras return equally many values for each
        # row, so that rows can be counted instead.
        varies = _is_custom(loss) and values.shape.rank != 0
        if mask is None:
            return _size(values) if varies else None
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        return valid * tf.math.divide_no_nan(_size(values), _size(mask)) if varies else valid
    weights: Any = tf.cast(sample_weight, tf.float32)
    if mask is None:
        return tf.reduce_sum(weights)
    valid, weights = internals.squeeze_or_expand_to_same_rank(tf.cast(mask, tf.float32), weights)
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
    overridden = type(layer).compute_mask is not keras.Layer.compute_mask
    return overridden and not _is_from_keras(type(layer))


def _is_custom(loss: Any) -> bool:
    """Return whether a loss is custom, so that it may return fewer values than rows."""
    return not _is_from_keras(getattr(loss, "fn", type(loss)))
