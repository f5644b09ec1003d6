"""Check by computation whether a batch in parts trains a model in the same way as a whole batch.

No list of layers and losses can decide this, because a loss that a layer adds may be a sum, and a
`call` may mix rows. So kbatch sends the same rows through the model as one batch, with Keras's
loss, and in parts of unequal size. It compares losses, gradients and outputs, first with the
current weights, and again after some changes of the weights.
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

from kbatch import library_internals as internals
from kbatch.device.failures import failure_text
from kbatch.records.notes import Note
from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.gradient_sum import as_tensor
from kbatch.training.accumulation.train_step import AccumulatingTrainStep
from kbatch.training.data import forms
from kbatch.training.model import batch_norms, installed_step, replica_count
from kbatch.training.state import kept_state, kept_values

EQUAL_UP_TO = 1e-4  # In float32, sums in another order differ by about 1e-6.
# Two passes of the whole batch may differ by this much, because a GPU adds in a varying order.
_REPEATS_UP_TO = 1e-5
# The weights change this often, by this share of their norms. Otherwise, weights that start at
# zero would have no effect.
_MOVES, _MOVE = 3, 0.03
# Differences are relative to the norm of a gradient, or to this share of the norm of all gradients,
# if that is larger: some gradients are zero except for rounding, such as of a key's bias.
_SMALLEST_SHARE = 0.01

# The results of a pass, by kind: the "loss" of each output, the total loss with "added" losses of
# layers, the "gradient" of each variable, the "state" that layers write in `call`, and the outputs
# ("layer"), which show whether a layer mixes rows. The first kind that differs is the cause.
_Pass = dict[str, list[np.ndarray]]
_KINDS = ("loss", "added", "gradient", "state")


def parts_note(model: keras.Model, rows: Any) -> Note | None:
    """Compare a batch in parts with the whole batch, in float32 and without dropout.

    Returns:
        A note about the difference, or None if there is none.
    """
    batch = _compared_rows(keras.utils.unpack_x_y_sample_weight(rows))
    compile_loss = internals.compile_loss_of(model)
    if int(forms.row_count(batch)) < 2:
        return _not_compared("a batch of one example cannot be split")
    try:
        if not (model.built and (compile_loss is None or compile_loss.built)):
            with model.distribute_strategy.scope():
                internals.build_symbolically(model, forms.each_part(as_tensor, batch))
        # Rounding to half precision would hide differences.
        layers = internals.layers_of(model)
        halves = [layer for layer in layers if "16" in (layer.compute_dtype or "")]
        with (
            model.distribute_strategy.scope(),
            kept_state(model),
            internals.layers_in_float32(halves),
            _exact_and_eager(),
        ):
            return _compared(model, batch)
    # The model's code may raise anything. Training may raise the same error with a better message.
    except Exception as error:
        return _not_compared(failure_text(error))


def _not_compared(reason: str) -> Note:
    return Note.of("parts_not_compared", found=reason.rstrip("."))


def _compared(model: keras.Model, batch: Any) -> Note | None:
    passes = _Passes(model, batch)
    whole = passes.whole()
    if not _is_finite(whole):
        return _not_compared("the loss or its gradient is not finite")
    again = passes.whole()
    if not max(_largest_difference(whole, again, kind)[0] for kind in _KINDS) <= _REPEATS_UP_TO:
        return _not_compared("the random draws of the model cannot be repeated")
    pairs = [(whole, passes.parts())]
    for _ in range(_MOVES):
        passes.move(whole["gradient"])
        whole = passes.whole()
    if _is_finite(whole):  # With the initial weights, the outputs may be equal for all rows.
        pairs.append((whole, passes.parts()))
    kinds = (*_KINDS, "layer")
    largest = {kind: max(_largest_difference(*pair, kind) for pair in pairs) for kind in kinds}
    kind = next((kind for kind in _KINDS if largest[kind][0] > EQUAL_UP_TO), None)
    if kind is None:
        return None
    difference, index = largest[kind]
    name = passes.name(kind, index)
    if not np.isfinite(difference):
        return _not_compared(
            f"{name} is not finite for a micro-batch, perhaps by division by 0 (`loss_denominator`)"
        )
    rows = int(forms.row_count(batch))
    percent = f"{100 * difference:{'.2g' if difference < 0.99 else ',.0f'}}"
    text = f"{name} differed by {percent} % in a comparison on {rows} examples"
    if largest["layer"][0] <= EQUAL_UP_TO:
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
    """Sends a batch through a model, whole or in parts, without updating the weights."""

    def __init__(self, model: Any, batch: Any):
        self._model, self._batch, self._rows = model, batch, int(forms.row_count(batch))
        trained = {id(variable) for variable in model.trainable_variables}
        self._state = [v for v in model.variables if id(v) not in trained]
        # Leave out BatchNormalization, which the accumulating step updates once for all parts.
        excluded = trained | {id(v) for layer in batch_norms(model) for v in layer.weights}
        self._written_in_call = [v for v in model.weights if id(v) not in excluded]
        self._totals: Sequence[tf.Tensor] = ()  # The denominators of the losses of the outputs.
        layers = internals.layers_of(model)
        self._recurrent = any(isinstance(layer, keras.layers.RNN) for layer in layers)
        self._graph: Any = tf.function(self._one_pass, autograph=False)

    def whole(self) -> _Pass:
        """Send the batch through as Keras's train step does."""
        return self._added_up([(self._batch, None)])

    def parts(self) -> _Pass:
        """Send the batch through in three parts of unequal size."""
        cuts = sorted({0, max(1, self._rows // 8), max(1, self._rows // 3), self._rows})

        def part(start: int, end: int) -> tuple[Any, float]:
            rows = forms.each_part(
                lambda leaf: forms.rows_between(leaf, start, end - start), self._batch
            )
            return rows, (end - start) / self._rows

        return self._added_up([part(*ends) for ends in itertools.pairwise(cuts)])

    def move(self, gradients: Sequence[np.ndarray]) -> None:
        """Move each weight against its gradient, by a share of the weight's norm."""
        for variable, gradient in zip(self._model.trainable_variables, gradients, strict=True):
            value = _wide(variable.value)
            length = _MOVE * max(np.linalg.norm(value), 1.0)
            variable.assign(value - length * gradient / max(np.linalg.norm(gradient), 1e-30))

    def name(self, kind: str, index: int) -> str:
        """Describe a result in words."""
        model, losses = self._model, internals.output_losses_of(self._model)
        if kind == "gradient":
            return f"the gradient of {model.trainable_variables[index].path}"
        if kind == "state":
            return f"{self._written_in_call[index].path}, which a layer changes in its `call`,"
        if kind == "loss":
            entry = losses[index]
            alone = len(losses) == 1 or not entry.name
            return f"the loss {entry.loss.name if alone else entry.name}"
        adding = [
            f"{layer.name} ({type(layer).__name__})"
            for layer in internals.layers_of(model)
            if internals.own_losses(layer)
        ]
        alone = output_losses.has_own_loss(model) or not adding
        return "the loss" if alone else f"the loss that {' or '.join(adding)} adds"

    def _added_up(self, parts: Sequence[tuple[Any, float | None]]) -> _Pass:
        """Send parts through the model, add their results, and restore the state of layers."""
        with kept_values(self._state):
            passes = [self._sent(*part) for part in parts]
            state = [_wide(variable.value) for variable in self._written_in_call]
        by_kind = {kind: zip(*(p[kind] for p in passes), strict=True) for kind in passes[0]}
        # Joined outputs have another length than the whole one if it is not one value per row.
        outputs = [np.concatenate([p.ravel() for p in group]) for group in by_kind.pop("layer")]
        sums = {kind: [np.sum(p, axis=0) for p in groups] for kind, groups in by_kind.items()}
        return sums | {"layer": outputs, "state": state}

    def _sent(self, rows: Any, share: float | None) -> _Pass:
        """Send rows through the model. `share`: their share of the batch. If None, all."""
        rows = forms.each_part(as_tensor, rows)
        arguments = (None, ()) if share is None else (tf.constant(share), self._totals)
        send: Any = self._one_pass
        if self._recurrent:  # To run a recurrent layer eagerly takes far longer than to trace it.
            specs = forms.each_part(tf.type_spec_from_value, arguments)
            send = self._graph.get_concrete_function(forms.each_part(forms.open_spec, rows), *specs)
        results, self._totals = send(rows, *arguments)
        return {kind: [_wide(value) for value in values] for kind, values in results.items()}

    def _one_pass(
        self, rows: Any, share: tf.Tensor | None, totals: Sequence[tf.Tensor]
    ) -> tuple[dict[str, list[tf.Tensor]], Sequence[tf.Tensor]]:
        model, (x, y, sample_weight) = self._model, rows
        with still_draws():
            with tf.GradientTape() as tape:
                y_pred = internals.forward(model, x, training=True)
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
                    loss = internals.compute_loss(model, x, y, y_pred, sample_weight)
            variables = model.trainable_weights
            gradients: Any = tape.gradient(loss, gradient_sum.sources(variables))
        outputs = [output for output in forms.parts_of(y_pred) if isinstance(output, tf.Tensor)]
        return {
            "layer": [output for output in outputs if output.dtype.is_floating],
            "loss": list(losses),
            "added": [loss],
            "gradient": [
                tf.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
                for variable, gradient in zip(variables, gradients, strict=True)
            ],
        }, list(totals)


def _is_finite(results: _Pass) -> bool:
    return all(np.isfinite(value).all() for kind in _KINDS for value in results[kind])


def _largest_difference(whole: _Pass, parts: _Pass, kind: str) -> tuple[float, int]:
    """Return the largest relative difference among results of a kind, and the result's index."""
    norms = [np.linalg.norm(value) for value in whole[kind]]
    least = max(_SMALLEST_SHARE * float(np.linalg.norm(norms)), 1e-30)
    differences = [(0.0, 0)]
    for i, (value, other) in enumerate(zip(whole[kind], parts[kind], strict=True)):
        if value.shape == other.shape:
            difference = float(np.linalg.norm(other - value) / max(norms[i], least))
            differences.append((np.inf if np.isnan(difference) else difference, i))
    return max(differences)


def _wide(value: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(value), np.float64)


def _compared_rows(rows: Any) -> Any:
    """Return every second row, sorted by the number of filled values, so that parts differ."""
    leaves, count = forms.parts_of(rows), int(forms.row_count(rows))
    if count < 4 or any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return rows
    # A padded value is 0. A missing label is NaN or negative.
    dense = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, tf.RaggedTensor)]
    numbers = [leaf for leaf in dense if leaf.dtype.kind in "iufb"]
    filled = sum(((leaf > 0).reshape(count, -1).sum(1) for leaf in numbers), np.zeros(count))
    order = np.argsort(filled, kind="stable")
    return forms.each_part(lambda leaf: tf.gather(leaf, order[::2]), rows)


@contextlib.contextmanager
def _exact_and_eager() -> Iterator[None]:
    """Turn off TensorFloat-32, which has errors of 1e-3, and graphs, which would keep draws."""
    tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    eager = tf.config.functions_run_eagerly()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(tensor_float_32)
        tf.config.run_functions_eagerly(eager)


def still_draws() -> contextlib.AbstractContextManager[None]:
    """Make Keras's random draws equal for all rows, and make dropout keep all values."""
    # Otherwise, rows of later parts would get other draws than in the whole batch.

    def still(name: str, draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        if name == "dropout":
            return lambda inputs, *args, **kwargs: inputs

        def drawn(shape: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
            kwargs["seed"] = 31 * len(name) + len(sizes)
            return tf.broadcast_to(draw([1, *sizes[1:]] if sizes else [], *args, **kwargs), sizes)

        return drawn

    return internals.replaced_draws(still)


def check_at_first_training(model: Any) -> None:
    """Make a model compare parts of its first training data with the whole, and perhaps warn."""
    for name in ("fit", "train_on_batch"):
        setattr(model, name, functools.partial(_checked_training, model, name))


def _checked_training(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    step = installed_step(model)
    names = list(inspect.signature(getattr(keras.Model, name)).parameters)[1:]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    cut, note = False, None
    try:
        rows, batch_size = _first_rows(arguments, batched=name == "train_on_batch")
        frozen = model.built and not model.trainable_weights
        if isinstance(step, AccumulatingTrainStep) and not frozen:
            size = step.accumulation.micro_batch_size
            cut = batch_size > size * replica_count(model)
            most = min(rows_to_compare(size), int(forms.row_count(rows)))
            note = parts_note(model, forms.first_rows(rows, most)) if cut else None
    # `fit` may accept data from which kbatch cannot take rows.
    except Exception as error:
        cut, note = True, _not_compared(failure_text(error))
    if cut:
        for attribute, hook in list(vars(model).items()):
            if getattr(hook, "func", None) is _checked_training:
                del vars(model)[attribute]
        if note is not None:
            warnings.warn(note, stacklevel=2)
        if isinstance(step, AccumulatingTrainStep):
            step.warns = True
            step.warn_of_metrics()
    if "x" in kwargs:
        kwargs["x"] = arguments["x"]
    elif args and "x" in arguments:
        args = (arguments["x"], *args[1:])
    return getattr(type(model), name)(model, *args, **kwargs)


def rows_to_compare(micro_batch_size: int | None = None) -> int:
    """Return how many rows `parts_note` needs for a micro-batch size."""
    # It compares every second row: at least 4, and at most 16, in parts of 2, 3 and 11 rows.
    return 2 * min(16, max(micro_batch_size or 16, 4))


def _first_rows(arguments: dict[str, Any], *, batched: bool) -> tuple[Any, int]:
    """Return some rows of the training data, and the batch size."""
    x: Any = arguments.get("x")
    if inspect.isgenerator(x):
        batch = next(x)
        arguments["x"] = (batch for batch in itertools.chain([batch], x))
    elif isinstance(x, keras.utils.PyDataset) or forms.is_dataset(x):
        batch = next(iter(x)) if forms.is_dataset(x) else x[0]
    else:
        parts = {"x": x, "y": arguments.get("y"), "weight": arguments.get("sample_weight")}
        first: Any = forms.each_part(lambda part: part[: rows_to_compare()], parts)
        rows, _ = forms.arrays_of(**first, class_weight=arguments.get("class_weight"))
        batch_size = len(forms.parts_of(x)[0]) if batched else arguments.get("batch_size") or 32
        return forms.each_part(np.asarray, rows), batch_size
    batch = forms.each_part(
        lambda part: part if forms.is_composite(part) else np.asarray(part), batch
    )
    return batch, int(forms.row_count(batch))
