"""Whether the parts of a batch train a model as the whole does: a check by value.

No list of layers and losses can decide it: a loss that a layer adds may be a sum, a `call` may mix
rows. So a batch goes through whole, by Keras's own loss, and in parts of unequal size, and what
comes out is compared: with the weights as they are, and where they moved to.
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.library_internals import (
    added_by,
    build_symbolically,
    compile_loss_of,
    compute_loss,
    forward,
    layers_in_float32,
    layers_of,
    output_losses_of,
    replaced_draws,
)
from kbatch.records.notes import Note
from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.gradient_sum import as_tensor
from kbatch.training.accumulation.train_step import AccumulatingTrainStep
from kbatch.training.data.forms import (
    arrays_of,
    each_part,
    first_rows,
    is_composite,
    is_dataset,
    open_spec,
    parts_of,
    row_count,
    rows_between,
)
from kbatch.training.model import batch_norms, installed_step, replica_count
from kbatch.training.state import kept_state, kept_values

# In float32 sums in another order differ by some 1e-6.
EQUAL_UP_TO = 1e-4
# A GPU adds up in an order of its own each time, and what differs by less than this leaves a
# comparison up to 1e-4 its meaning.
_STILL_UP_TO = 1e-5
# How far the weights move: a share of the norm of each, so that what was zero at first counts.
_MOVES, _MOVE = 3, 0.03
# What is zero but for rounding, such as the gradient of a key's bias, is held against all others.
_SMALLEST_SHARE = 0.01

# What a pass brings, by kind, in the order in which they tell what is wrong: the "loss" of an
# output, the one with what layers "added", the "gradient" of a variable, the "state" that a layer
# keeps in its `call`. That a "layer" mixes rows shows in the outputs.
_Pass = dict[str, list[np.ndarray]]
_KINDS = ("loss", "added", "gradient", "state")


def parts_note(model: keras.Model, rows: Any) -> Note | None:
    """Say how a batch in parts trains otherwise than the whole, in float32 without dropout.

    Returns None where it trains as the whole does.
    """
    batch = _compared_rows(keras.utils.unpack_x_y_sample_weight(rows))
    compile_loss = compile_loss_of(model)
    if int(row_count(batch)) < 2:
        return _not_compared("a batch of one example has no parts")
    try:
        if not (model.built and (compile_loss is None or compile_loss.built)):
            with model.distribute_strategy.scope():
                build_symbolically(model, each_part(as_tensor, batch))
        # Rounding to half precision hides what is compared.
        halves = [layer for layer in layers_of(model) if "16" in (layer.compute_dtype or "")]
        with (
            model.distribute_strategy.scope(),
            kept_state(model),
            layers_in_float32(halves),
            _exact_and_eager(),
        ):
            return _compared(model, batch)
    # Whatever a model raises here, training may raise as well, and says more.
    except Exception as error:
        return _not_compared(failure_text(error))


def _not_compared(reason: str) -> Note:
    found = f"no comparison with parts of it could be made ({reason})"
    return Note.of("parts_not_compared", found=found)


def _compared(model: keras.Model, batch: Any) -> Note | None:
    passes = _Passes(model, batch)
    first = passes.whole()
    if not _is_finite(first):
        return _not_compared("the loss or its gradient is not finite")
    again = passes.whole()
    if not max(_largest_difference(first, again, kind)[0] for kind in _KINDS) <= _STILL_UP_TO:
        return _not_compared("its randomness cannot be held still")
    pairs = [(first, passes.parts())]
    for _ in range(_MOVES):
        passes.move(first["gradient"])
        first = passes.whole()
    # At first outputs may be alike for all rows, so that only gradients differ.
    if _is_finite(first):
        pairs.append((first, passes.parts()))
    kinds = (*_KINDS, "layer")
    found = {kind: max(_largest_difference(*pair, kind) for pair in pairs) for kind in kinds}
    kind = next((kind for kind in _KINDS if found[kind][0] > EQUAL_UP_TO), None)
    if kind is None:
        return None
    difference, index = found[kind]
    where = passes.name(kind, index)
    if not np.isfinite(difference):
        return _not_compared(
            f"{where} is not finite on a part: it may divide by 0, see `loss_denominator`"
        )
    rows = int(row_count(batch))
    percent = f"{100 * difference:{'.2g' if difference < 0.99 else ',.0f'}}"
    text = f"{where} differed by {percent} % in a comparison on {rows} examples"
    if found["layer"][0] <= EQUAL_UP_TO:
        if kind == "added" and output_losses.has_own_loss(model):
            kind = "loss"
        return Note.of("parts_differ", found=text, source=None if kind == "gradient" else kind)
    for layer in batch_norms(model):
        if layer.trainable:
            parts = f"{layer.name} (BatchNormalization); {text}"
            return Note.of("batch_normalization_in_parts", parts=parts)
    text += "; outputs depend on other rows"
    return Note.of("parts_differ", found=text, source="layer")


class _Passes:
    """A batch sent through a model, whole or in parts, without an update."""

    def __init__(self, model: Any, batch: Any):
        self._model, self._batch, self._rows = model, batch, int(row_count(batch))
        trained = {id(variable) for variable in model.trainable_variables}
        self._state = [one for one in model.variables if id(one) not in trained]
        # An update takes BatchNormalization's moving statistics on once, whatever is cut.
        apart = trained | {id(one) for layer in batch_norms(model) for one in layer.weights}
        self._kept_in_call = [one for one in model.weights if id(one) not in apart]
        self._totals: Sequence[tf.Tensor] = ()  # What the losses of the outputs are divided by.
        layers = layers_of(model)
        self._recurrent = any(isinstance(one, keras.layers.RNN) for one in layers)
        self._graph: Any = tf.function(self._one_pass, autograph=False)

    def whole(self) -> _Pass:
        """Send the batch through as Keras's own train step does."""
        return self._added_up([(self._batch, None)])

    def parts(self) -> _Pass:
        """Send the batch through in three parts of unequal size."""
        cuts = sorted({0, max(1, self._rows // 8), max(1, self._rows // 3), self._rows})

        def part(start: int, end: int) -> tuple[Any, float]:
            rows = each_part(lambda leaf: rows_between(leaf, start, end - start), self._batch)
            return rows, (end - start) / self._rows

        return self._added_up([part(*ends) for ends in itertools.pairwise(cuts)])

    def move(self, gradients: Sequence[np.ndarray]) -> None:
        """Move the weights down their gradients, each by a share of its norm."""
        for variable, gradient in zip(self._model.trainable_variables, gradients, strict=True):
            value = _wide(variable.value)
            length = _MOVE * max(np.linalg.norm(value), 1.0)
            variable.assign(value - length * gradient / max(np.linalg.norm(gradient), 1e-30))

    def name(self, kind: str, index: int) -> str:
        """Name what differed."""
        model, losses = self._model, output_losses_of(self._model)
        if kind == "gradient":
            return f"the gradient of {model.trainable_variables[index].path}"
        if kind == "state":
            return f"{self._kept_in_call[index].path}, which a layer keeps in its `call`,"
        if kind == "loss":
            one = losses[index]
            return f"the loss {one.loss.name if len(losses) == 1 else one.name or one.loss.name}"
        adding = [f"{one.name} ({type(one).__name__})" for one in layers_of(model) if added_by(one)]
        alone = output_losses.has_own_loss(model) or not adding
        return "the loss" if alone else f"the loss that {' or '.join(adding)} adds"

    def _added_up(self, parts: Sequence[tuple[Any, float | None]]) -> _Pass:
        """Send parts through and add up what they bring, before what layers keep is put back."""
        with kept_values(self._state):
            found = [self._sent(*part) for part in parts]
            state = [_wide(one.value) for one in self._kept_in_call]
        # One by one: an output that is no value a row has another length in parts.
        by_kind = {kind: zip(*(one[kind] for one in found), strict=True) for kind in found[0]}
        outputs = [np.concatenate([one.ravel() for one in ones]) for ones in by_kind.pop("layer")]
        added = {kind: [np.sum(one, axis=0) for one in ones] for kind, ones in by_kind.items()}
        return added | {"layer": outputs, "state": state}

    def _sent(self, rows: Any, share: float | None) -> _Pass:
        """Send rows through, a share of those of the batch or all; return what to compare."""
        rows = each_part(as_tensor, rows)
        given = (None, ()) if share is None else (tf.constant(share), self._totals)
        send: Any = self._one_pass
        # Outside of a graph the loop of a recurrent layer takes far longer than to trace it.
        if self._recurrent:
            specs = each_part(tf.type_spec_from_value, given)
            send = self._graph.get_concrete_function(each_part(open_spec, rows), *specs)
        found, self._totals = send(rows, *given)
        return {kind: [_wide(one) for one in ones] for kind, ones in found.items()}

    def _one_pass(
        self, rows: Any, share: tf.Tensor | None, totals: Sequence[tf.Tensor]
    ) -> tuple[dict[str, list[tf.Tensor]], Sequence[tf.Tensor]]:
        model, (x, y, sample_weight) = self._model, rows
        with still_draws():
            with tf.GradientTape() as tape:
                y_pred = forward(model, x, training=True)
                added = list(model.losses)
                if share is None and output_losses.need_counting(model):
                    totals = output_losses.denominators(model, (y, y_pred, sample_weight))
                loss, losses = output_losses.part_of_batch_loss(
                    model,
                    (x, y, y_pred, sample_weight),
                    rows_share=tf.ones([]) if share is None else share,
                    totals=totals,
                    added_losses=added,
                )
                if share is None:
                    loss = compute_loss(model, x, y, y_pred, sample_weight)
            variables = model.trainable_weights
            gradients: Any = tape.gradient(loss, gradient_sum.sources(variables))
        outputs = [one for one in parts_of(y_pred) if isinstance(one, tf.Tensor)]
        return {
            "layer": [one for one in outputs if one.dtype.is_floating],
            "loss": list(losses),
            "added": [loss],
            "gradient": [
                tf.zeros(variable.shape) if one is None else tf.convert_to_tensor(one)
                for variable, one in zip(variables, gradients, strict=True)
            ],
        }, list(totals)


def _is_finite(found: _Pass) -> bool:
    return all(np.isfinite(one).all() for kind in _KINDS for one in found[kind])


def _largest_difference(whole: _Pass, parts: _Pass, kind: str) -> tuple[float, int]:
    """Return the largest difference of a kind, over the norm of what differs, and which it is."""
    norms = [np.linalg.norm(one) for one in whole[kind]]
    least = max(_SMALLEST_SHARE * float(np.linalg.norm(norms)), 1e-30)
    found = [(0.0, 0)]
    for i, (one, other) in enumerate(zip(whole[kind], parts[kind], strict=True)):
        if one.shape == other.shape:
            difference = float(np.linalg.norm(other - one) / max(norms[i], least))
            found.append((np.inf if np.isnan(difference) else difference, i))
    return max(found)


def _wide(value: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(value), np.float64)


def _compared_rows(rows: Any) -> Any:
    """Take every second row, from those with little in them to those with much: parts differ."""
    leaves, count = parts_of(rows), int(row_count(rows))
    if count < 4 or any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return rows
    # Padding is 0 and a missing label NaN or negative.
    dense = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, tf.RaggedTensor)]
    numbers = [leaf for leaf in dense if leaf.dtype.kind in "iufb"]
    filled = sum(((leaf > 0).reshape(count, -1).sum(1) for leaf in numbers), np.zeros(count))
    order = np.argsort(filled, kind="stable")
    return each_part(lambda leaf: tf.gather(leaf, order[::2]), rows)


@contextlib.contextmanager
def _exact_and_eager() -> Iterator[None]:
    """Leave out TensorFloat-32, which is off by 1e-3, and graphs that would keep still draws."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    within = tf.config.functions_run_eagerly()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
        tf.config.run_functions_eagerly(within)


def still_draws() -> contextlib.AbstractContextManager[None]:
    """Hold Keras's random draws still for one pass: each row gets the same, dropout keeps all."""
    # The first part would draw what the first rows of the whole get, and later parts would not.

    def still(name: str, draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        if name == "dropout":
            return lambda inputs, *args, **kwargs: inputs

        def drawn(shape: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
            kwargs["seed"] = 31 * len(name) + len(sizes)
            return tf.broadcast_to(draw([1, *sizes[1:]] if sizes else [], *args, **kwargs), sizes)

        return drawn

    return replaced_draws(still)


def check_at_first_training(model: Any) -> None:
    """Let a model compare rows of the first data that it is given to train on, and warn."""
    for name in ("fit", "train_on_batch"):
        setattr(model, name, functools.partial(_checked_training, model, name))


def _checked_training(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    step = installed_step(model)
    names = list(inspect.signature(getattr(keras.Model, name)).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    cut, note = False, None
    try:
        rows, at_once = _first_rows(given, batched=name == "train_on_batch")
        frozen = model.built and not model.trainable_weights
        if isinstance(step, AccumulatingTrainStep) and not frozen:
            size = step.how.micro_batch_size
            cut = at_once > size * replica_count(model)
            most = min(rows_to_compare(size), int(row_count(rows)))
            note = parts_note(model, first_rows(rows, most)) if cut else None
    # Data in which this finds no rows `fit` may take all the same.
    except Exception as error:
        cut, note = True, _not_compared(failure_text(error))
    if cut:
        for own, hook in list(vars(model).items()):
            if getattr(hook, "func", None) is _checked_training:
                del vars(model)[own]
        if note is not None:
            warnings.warn(note, stacklevel=2)
        if isinstance(step, AccumulatingTrainStep):
            step.warns = True
            step.warn_of_metrics()
    if "x" in kwargs:
        kwargs["x"] = given["x"]
    elif args and "x" in given:
        args = (given["x"], *args[1:])
    return getattr(type(model), name)(model, *args, **kwargs)


def rows_to_compare(micro_batch_size: int | None = None) -> int:
    """Return how many rows to compare where batches are cut into parts of a size."""
    # Half of them are compared, up to 16 in parts of 2, 3 and 11. Fewer than four tell little.
    return 2 * min(16, max(micro_batch_size or 16, 4))


def _first_rows(given: dict[str, Any], *, batched: bool) -> tuple[Any, int]:
    """Return some rows of what training is given, and how many there are in a batch."""
    x: Any = given.get("x")
    if inspect.isgenerator(x):
        batch = next(x)
        given["x"] = (one for one in itertools.chain([batch], x))
    elif isinstance(x, keras.utils.PyDataset) or is_dataset(x):
        batch = next(iter(x)) if is_dataset(x) else x[0]
    else:
        parts = {"x": x, "y": given.get("y"), "weight": given.get("sample_weight")}
        first: Any = each_part(lambda part: part[: rows_to_compare()], parts)
        rows, _ = arrays_of(**first, class_weight=given.get("class_weight"))
        whole = len(parts_of(x)[0]) if batched else given.get("batch_size") or 32
        return each_part(np.asarray, rows), whole
    batch = each_part(lambda part: part if is_composite(part) else np.asarray(part), batch)
    return batch, int(row_count(batch))
