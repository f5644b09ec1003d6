"""What looks at a batch as a whole and so sees micro-batches instead.

BatchNormalization normalises by the statistics of the rows it is given, and some losses compare
the rows of a batch with each other: cut into micro-batches they compute something else, which
no weighting repairs.
"""

from typing import Any

import keras

from kbatch.document.number_text import readable
from kbatch.training.accumulation.parts_check_record import PartsCheck

_COUPLED_LAYERS = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
# Losses of Keras that relate the rows of a batch: ratios of sums over all of it, or pairs.
_COUPLED_LOSSES = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)


def coupled_parts(model: keras.Model) -> tuple[str, ...]:
    """Names the layers and losses of a model that cannot be cut by rows.

    A layer that the model calls with `training=False` is named too, which types do not tell: a
    functional model calls it in training all the same, one with a `call` of its own does not.

    Args:
        model: A compiled model.

    Returns:
        A name with its kind for each, such as `"bn1 (BatchNormalization)"`; empty if the model
        can be cut exactly, as far as types tell.
    """
    layers = [
        f"{layer.name} ({type(layer).__name__})"
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, _COUPLED_LAYERS) and layer.trainable
    ]
    losses = {name for loss in keras.tree.flatten(model.loss) if (name := _coupled_loss_name(loss))}
    return (*layers, *(f"{name} (loss)" for name in sorted(losses)))


def coupling_note(parts: tuple[str, ...]) -> str:
    """Says in a sentence what the coupled parts mean for the result."""
    return (
        f"Not equal to the whole batch, since computed on each micro-batch by itself: "
        f"{', '.join(parts)}. "
        "Use GroupNormalization or LayerNormalization, or a micro-batch as large as the batch, "
        "for an exact large batch."
    )


def check_note(check: PartsCheck) -> str:
    """Say in a sentence what a check that did not pass means for a batch that is cut."""
    if check.difference is None:
        return f"Not known to be equal to the whole batch: {check_text(check)}."
    return f"Not equal to the whole batch when it is cut into parts: {check_text(check)}."


def check_text(check: PartsCheck) -> str:
    """Say what a check that did not pass found."""
    if check.difference is None:
        return f"no comparison with parts of it could be made ({check.reason})"
    percent = readable(100 * check.difference, 2)
    return f"{check.where} differed by {percent} % in a comparison on {check.rows} examples"


def _coupled_loss_name(loss: Any) -> str | None:
    if isinstance(loss, _COUPLED_LOSSES):
        return type(loss).__name__
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    return name if name.lower() in {kind.__name__.lower() for kind in _COUPLED_LOSSES} else None
