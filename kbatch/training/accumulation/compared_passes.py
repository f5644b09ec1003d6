"""Batches sent through a model whole and in parts, without an update, to be compared.

Random draws are held still, which are no matter of parts.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import (
    added_by,
    compute_loss,
    forward,
    layers_of,
    observed_calls,
    output_losses_of,
    replaced_draws,
)
from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.gradient_sum import as_tensor
from kbatch.training.data.forms import each_part, open_spec, parts_of, row_count, rows_between
from kbatch.training.state import kept_values

# How far the weights move: a share of the norm of each, so that what was zero at first counts.
_MOVE = 0.03
# In float32 sums in another order differ by some 1e-6. A GPU adds up in an order of its own each
# time, and what differs by less than this leaves a comparison up to 1e-4 its meaning.
STILL_UP_TO = 1e-5


class Pass(NamedTuple):
    terms: dict[str, float]
    gradients: dict[str, np.ndarray]
    state: dict[str, tuple[np.ndarray, np.ndarray]]  # What layers keep in `call`: before, after.

    def is_finite(self) -> bool:
        values = (*self.terms.values(), *self.gradients.values())
        return all(np.isfinite(value).all() for value in values)


class Passes:
    """A batch sent through a model, whole or in parts, without an update."""

    def __init__(self, model: Any, batch: Any):
        self._model = model
        self._structure = batch
        trained = {id(variable) for variable in model.trainable_variables}
        self._state = [one for one in model.variables if id(one) not in trained]
        # An update takes BatchNormalization's moving statistics on once, whatever is cut.
        norm = keras.layers.BatchNormalization
        norms = [layer for layer in layers_of(model) if isinstance(layer, norm)]
        apart = trained | {id(weight) for layer in norms for weight in layer.weights}
        self._kept_in_call = [one for one in model.weights if id(one) not in apart]
        self._counts = output_losses.need_counting(model)
        self.sources: dict[str, str] = {}  # "loss" or "added", by name of a term.
        specs = [open_spec(leaf) for leaf in parts_of(batch)]
        share, totals = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
        self._whole = _traced(model, lambda rows: self._one_pass(rows), specs)
        self._count = _traced(model, self._counting_pass, specs) if self._counts else None
        self._part = _traced(model, lambda *of_part: self._one_pass(*of_part), specs, share, totals)

    def whole(self, batch: Any) -> Pass:
        """Send a batch through as Keras's own train step does."""
        before = self._kept()
        with kept_values(self._state):
            terms, gradients = self._whole(parts_of(batch))
            return self._pass(terms, gradients, before)

    def parts(self, batch: Any) -> Pass:
        """Send a batch through in three parts, and add them up."""
        parts, rows = _parts(batch), int(row_count(batch))
        totals = tf.zeros([0])
        if self._count is not None:
            with kept_values(self._state):
                totals = tf.add_n([self._count(part) for part in parts])
        terms, before = 0.0, self._kept()
        gradients: list[Any] = [0.0] * len(self._model.trainable_variables)
        with kept_values(self._state):
            for part in parts:
                share = tf.constant(int(row_count(part)) / rows, tf.float32)
                its_terms, its_gradients = self._part(part, share, totals)
                terms = terms + wide(its_terms)
                gradients = [a + wide(b) for a, b in zip(gradients, its_gradients, strict=True)]
            return self._pass(terms, gradients, before)

    def first_layer_apart(self, batch: Any) -> str | None:
        """Name the first layer whose values differ in parts, None where none does."""
        seen: list[list[tuple[Any, list[Any]]]] = []

        def see(layer: Any, values: Any) -> None:
            tensors = [one for one in parts_of(values) if isinstance(one, tf.Tensor)]
            seen[-1].append((layer, [wide(one) for one in tensors if one.dtype.is_floating]))

        for pieces in ([parts_of(batch)], _parts(batch)):
            with kept_values(self._state), observed_calls(self._model, see):
                for leaves in pieces:
                    seen.append([])
                    with _still_draws():
                        forward(self._model, self._nested(leaves)[0], training=True)
        whole, *parts = seen
        for (layer, values), *others in zip(whole, *parts, strict=False):
            for value, *pieces in zip(values, *(found for _, found in others), strict=False):
                joined = np.concatenate(pieces) if value.ndim else value
                distance = joined.shape == value.shape and np.linalg.norm(joined - value)
                if distance > STILL_UP_TO * np.linalg.norm(value):
                    return f"{layer.name} ({type(layer).__name__})"
        return None

    def move(self, found: Pass) -> None:
        """Move the weights down the gradient, each by a share of its norm."""
        for variable, gradient in zip(
            self._model.trainable_variables, found.gradients.values(), strict=True
        ):
            value = np.asarray(tf.convert_to_tensor(variable.value), np.float64)
            length = _MOVE * max(np.linalg.norm(value), 1.0)
            variable.assign(value - length * gradient / max(np.linalg.norm(gradient), 1e-30))

    def _kept(self) -> list[np.ndarray]:
        return [wide(tf.convert_to_tensor(one.value)) for one in self._kept_in_call]

    def _pass(self, terms: Any, gradients: Sequence[Any], before: list[np.ndarray]) -> Pass:
        """Make what is compared of a pass, before what layers keep is put back."""
        names = _numbered([f"the gradient of {v.path}" for v in self._model.trainable_variables])
        states = [f"{v.path}, which a layer keeps in its `call`," for v in self._kept_in_call]
        return Pass(
            dict(zip(self.sources, map(float, wide(terms)), strict=True)),
            dict(zip(names, map(wide, gradients), strict=True)),
            dict(zip(states, zip(before, self._kept(), strict=True), strict=True)),
        )

    def _one_pass(self, leaves: list[Any], rows_share: Any = None, totals: Any = None) -> Any:
        """Send rows through: a share of those of a batch with what it is divided by, or all."""
        model = self._model
        x, y, sample_weight = self._nested(leaves)
        known: Sequence[tf.Tensor] = ()
        with _still_draws():
            with tf.GradientTape() as tape:
                y_pred = forward(model, x, training=True)
                added = list(model.losses)
                if self._counts and rows_share is None:
                    known = output_losses.denominators(model, (y, y_pred, sample_weight))
                elif self._counts:
                    known = [totals[i] for i, _ in enumerate(output_losses_of(model))]
                share = tf.ones([]) if rows_share is None else rows_share
                loss, terms = output_losses.part_of_batch_loss(
                    model,
                    (x, y, y_pred, sample_weight),
                    rows_share=share,
                    totals=known,
                    added_losses=added,
                )
                # How a `compute_loss` of the user's own takes what layers add, only its result
                # tells.
                if not output_losses.has_own_loss(model):
                    terms = (*terms, *output_losses.penalties(model, added, share))
                if rows_share is None:
                    self.sources = self._named_terms()
                    loss = compute_loss(model, x, y, y_pred, sample_weight)
            variables = model.trainable_weights
            found: Any = tape.gradient(loss, gradient_sum.sources(variables))
            gradients = [
                tf.zeros(variable.shape) if one is None else tf.convert_to_tensor(one)
                for variable, one in zip(variables, found, strict=True)
            ]
        return tf.stack([tf.cast(one, tf.float32) for one in (loss, *terms)]), gradients

    def _counting_pass(self, leaves: list[Any]) -> tf.Tensor:
        x, y, sample_weight = self._nested(leaves)
        with _still_draws():
            y_pred = forward(self._model, x, training=True)
            return tf.stack(output_losses.denominators(self._model, (y, y_pred, sample_weight)))

    def _named_terms(self) -> dict[str, str]:
        found = output_losses_of(self._model)
        named = [one.loss.name if len(found) == 1 else one.name or one.loss.name for one in found]
        losses, added = ["the loss", *(f"the loss {name}" for name in named)], []
        if not output_losses.has_own_loss(self._model):
            added = [
                f"the loss that {layer.name} ({type(layer).__name__}) adds"
                for layer in layers_of(self._model)
                for _ in added_by(layer)
            ]
            added += ["a penalty on weights"] * (len(self._model.losses) - len(added))
        names = _numbered([*losses, *added])
        return {name: "loss" if i < len(losses) else "added" for i, name in enumerate(names)}

    def _nested(self, leaves: list[Any]) -> Any:
        rest = iter(leaves)
        return each_part(lambda _: as_tensor(next(rest)), self._structure)


def _parts(batch: Any) -> list[list[Any]]:
    """Cut a batch into three parts of unequal size."""
    leaves = parts_of(batch)
    rows = int(row_count(batch))
    cuts = sorted({0, max(1, rows // 8), max(1, rows // 3), rows})
    pairs = itertools.pairwise(cuts)
    return [[rows_between(leaf, a, b - a) for leaf in leaves] for a, b in pairs]


def _traced(model: Any, function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    """Trace a pass for any number of rows."""
    if model.run_eagerly:
        return function
    return tf.function(function, autograph=False).get_concrete_function(*signature)


def _numbered(names: Sequence[str]) -> list[str]:
    return [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]


def wide(value: Any) -> np.ndarray:
    """Return a tensor as an array of float64."""
    return np.asarray(value, np.float64)


def _still_draws() -> contextlib.AbstractContextManager[None]:
    """Hold Keras's random draws still for one pass: each row gets the same, dropout keeps all."""
    # A draw depends on how many rows there are: a part never gets those of its rows in the whole.

    def still(name: str, draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        if name == "dropout":
            return lambda inputs, *args, **kwargs: inputs
        signature = inspect.signature(draw)

        def drawn(*args: Any, **kwargs: Any) -> tf.Tensor:
            call = signature.bind(*args, **kwargs)
            shape = call.arguments["shape"]
            sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
            seed = 31 * len(name) + len(sizes)
            call.arguments |= {"seed": seed, "shape": [1, *sizes[1:]] if sizes else []}
            return tf.broadcast_to(draw(*call.args, **call.kwargs), sizes)

        return drawn

    return replaced_draws(("normal", "uniform", "truncated_normal", "randint", "dropout"), still)
