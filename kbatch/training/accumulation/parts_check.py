"""Whether the parts of a batch train a model as the whole does: a check by value.

No list of layers and losses can tell: a loss that a layer adds may be a sum, a `call` may mix
rows. So batches go through whole, by Keras's own loss, and in parts of unequal size, and what
comes out is compared: with the weights as they are, and where they moved to.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.environment import read_environment
from kbatch.library_internals import (
    added_by,
    build_symbolically,
    compile_loss_of,
    compute_loss,
    forward,
    layers_of,
    output_losses_of,
    policy_of_layers,
    replaced_applies,
    replaced_draws,
    trained_by,
)
from kbatch.records.json_codec import load_if_readable, write_record
from kbatch.records.notes import RunNote
from kbatch.training.accumulation import output_losses
from kbatch.training.accumulation.accumulate import (
    EQUAL_UP_TO,
    PartsCheck,
    check_note,
    coupled_parts,
    coupling_note,
)
from kbatch.training.accumulation.exact import ExactUpdate
from kbatch.training.accumulation.gradient_sum import cut
from kbatch.training.accumulation.train_step import Collected, accumulate_step
from kbatch.training.clock import replica_count
from kbatch.training.data.forms import each_part, parts_of
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of, row_shapes
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import user_step
from kbatch.training.state import KeptState, kept_state

_MOVES = 3
# Of the norm of a variable: far enough that what was zero at first counts.
_MOVE = 0.03
# A gradient that is zero but for rounding, such as of a key's bias, is held against all others.
_SMALLEST_SHARE = 0.01
# A GPU adds up in an order of its own each time: two runs of the whole differ by some 1e-6, and
# what differs by less than a tenth of what counts as equal leaves the comparison its meaning.
_STILL_UP_TO = EQUAL_UP_TO / 10


def check_parts(model: keras.Model, rows: Any) -> PartsCheck:
    """Compare batches that go through a model whole and in parts.

    Draws are held still and dropout is left out, which are no matter of parts; BatchNormalization
    trains. Layers compute in float32, whatever their policy.
    """
    own = user_step(model) is not None
    batches = _batches(rows if own else keras.utils.unpack_x_y_sample_weight(rows))
    count = len(parts_of(batches[0])[0])
    if count < 2:
        return PartsCheck(None, None, "a batch of one example has no parts", count)
    compile_loss = compile_loss_of(model)
    try:
        if not own and not (model.built and (compile_loss is None or compile_loss.built)):
            build_symbolically(model, each_part(tf.convert_to_tensor, batches[0]))
        # Rounding to half precision hides what is compared.
        halves = [layer for layer in layers_of(model) if "16" in (layer.compute_dtype or "")]
        with kept_state(model), policy_of_layers(halves, "float32"), _exact_products():
            return _compared(model, batches, count)
    # Whatever a model raises here, training may raise as well, and says more.
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), "")
        return PartsCheck(None, None, f"{type(error).__name__}: {said}"[:300], count)


class _Pass(NamedTuple):
    """Values by name: loss terms, and gradients of variables."""

    terms: dict[str, float]
    gradients: dict[str, np.ndarray]

    def is_finite(self) -> bool:
        values = (*self.terms.values(), *self.gradients.values())
        return all(np.isfinite(value).all() for value in values)


def _compared(model: keras.Model, batches: Sequence[Any], count: int) -> PartsCheck:
    passes = (_Passes if user_step(model) is None else _OwnPasses)(model, batches[0])
    first = passes.whole(batches[0])
    if not first.is_finite():
        return PartsCheck(None, None, "the loss or its gradient is not finite", count)
    again, _ = _largest_difference(first, passes.whole(batches[0]))
    if not again <= _STILL_UP_TO:
        return PartsCheck(None, None, "its randomness cannot be held still", count)
    found = [_largest_difference(first, passes.parts(batches[0]))]
    found += [_largest_difference(passes.whole(one), passes.parts(one)) for one in batches[1:]]
    for _ in range(_MOVES):
        passes.move(first)
        first = passes.whole(batches[0])
    if first.is_finite():
        found += [_largest_difference(passes.whole(one), passes.parts(one)) for one in batches]
    difference, where = max(found)
    if not np.isfinite(difference):
        return PartsCheck(None, None, f"{where} is not finite on a part", count)
    exact = None
    if difference > EQUAL_UP_TO and isinstance(passes, _Passes):
        exact = _exact_difference(passes, batches)
    return PartsCheck(difference, where, None, count, exact)


def _exact_difference(passes: "_Passes", batches: Sequence[Any]) -> float | None:
    try:
        pairs = [(passes.whole(one), passes.exact(one)) for one in batches]
    # What it raises here, it raises in training too, for whoever asks for it.
    except Exception:
        return None
    # Where a term differs in size, so does the loss.
    found = [
        _largest_difference(w._replace(terms={"the loss": w.terms["the loss"]}), e)[0]
        for w, e in pairs
    ]
    return max(found) if np.isfinite(max(found)) else None


class _Passes:
    """A batch sent through a model, whole or in parts, without an update."""

    def __init__(self, model: Any, batch: Any):
        self._model = model
        self._structure = batch
        trained = {id(variable) for variable in model.trainable_variables}
        self._state = [one for one in model.variables if id(one) not in trained]
        self._counts = output_losses.need_counting(model)
        self._names: list[str] = []
        self._rows = len(parts_of(batch)[0])
        self._exact: Callable[..., Any] | None = None
        self._specs = specs = [
            tf.TensorSpec((None, *leaf.shape[1:]), tf.as_dtype(leaf.dtype))
            for leaf in parts_of(batch)
        ]
        share, totals = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
        self._whole = self._traced(self._whole_pass, specs)
        self._count = self._traced(self._counting_pass, specs)
        self._part = self._traced(self._part_pass, specs, share, totals)

    def whole(self, batch: Any) -> _Pass:
        """Send a batch through as Keras's own train step does."""
        with self._kept_statistics():
            return self._pass(*self._whole(parts_of(batch)))

    def parts(self, batch: Any) -> _Pass:
        """Send a batch through in three parts, and add them up."""
        leaves = parts_of(batch)
        rows = len(leaves[0])
        cuts = sorted({0, max(1, rows // 8), max(1, rows // 3), rows})
        parts = [[leaf[a:b] for leaf in leaves] for a, b in itertools.pairwise(cuts)]
        totals = tf.zeros([0])
        if self._counts:
            with self._kept_statistics():
                totals = tf.add_n([self._count(part) for part in parts])
        loss, terms = 0.0, 0.0
        gradients: list[Any] = [0.0] * len(self._model.trainable_variables)
        with self._kept_statistics():
            for part in parts:
                share = tf.constant(len(part[0]) / rows, tf.float32)
                one, its_terms, its_gradients = self._part(part, share, totals)
                loss, terms = loss + _wide(one), terms + _wide(its_terms)
                gradients = [a + _wide(b) for a, b in zip(gradients, its_gradients, strict=True)]
        return self._pass(loss, terms, gradients)

    def exact(self, batch: Any) -> _Pass:
        """Send a batch through in three parts, by the loss of the whole."""
        if self._exact is None:
            self._exact = _traced(self._model, self._exact_pass, self._specs)
        with self._kept_statistics():
            loss, gradients = self._exact(parts_of(batch))
        return self._pass(loss, [], gradients)

    def move(self, found: _Pass) -> None:
        """Move the weights down the gradient, each by a share of its norm."""
        for variable, gradient in zip(
            self._model.trainable_variables, found.gradients.values(), strict=True
        ):
            value = np.asarray(tf.convert_to_tensor(variable.value), np.float64)
            length = _MOVE * max(np.linalg.norm(value), 1.0)
            variable.assign(value - length * gradient / max(np.linalg.norm(gradient), 1e-30))

    def _pass(self, loss: Any, terms: Any, gradients: Sequence[Any]) -> _Pass:
        values = [loss, *np.atleast_1d(_wide(terms))]
        names = _numbered([f"the gradient of {v.path}" for v in self._model.trainable_variables])
        return _Pass(
            # The exact mode has no terms.
            dict(zip(("the loss", *self._names), map(float, values), strict=False)),
            dict(zip(names, map(_wide, gradients), strict=True)),
        )

    @contextlib.contextmanager
    def _kept_statistics(self) -> Iterator[None]:
        kept = [tf.identity(one.value) for one in self._state]
        yield
        for variable, value in zip(self._state, kept, strict=True):
            variable.assign(value)

    def _traced(self, function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
        return _traced(self._model, _with_still_draws(function), *signature)

    def _whole_pass(self, leaves: list[tf.Tensor]) -> Any:
        x, y, sample_weight = self._nested(leaves)
        with tf.GradientTape() as tape:
            y_pred = forward(self._model, x, training=True)
            added = list(self._model.losses)
            loss = compute_loss(self._model, x, y, y_pred, sample_weight)
        gradients = self._gradients(tape, loss)
        totals = self._totals(y, y_pred, sample_weight)
        _, terms = self._terms((x, y, y_pred, sample_weight), tf.ones([]), totals, added)
        self._names = self._term_names()
        return loss, terms, gradients

    def _counting_pass(self, leaves: list[tf.Tensor]) -> tf.Tensor:
        if not self._counts:
            return tf.zeros([0])
        x, y, sample_weight = self._nested(leaves)
        return tf.stack(self._totals(y, forward(self._model, x, training=True), sample_weight))

    def _part_pass(self, leaves: list[tf.Tensor], rows_share: tf.Tensor, totals: tf.Tensor) -> Any:
        x, y, sample_weight = self._nested(leaves)
        outputs = output_losses.output_count(self._model) if self._counts else 0
        with tf.GradientTape() as tape:
            y_pred = forward(self._model, x, training=True)
            added = list(self._model.losses)
            known = [totals[i] for i in range(outputs)]
            loss, terms = self._terms((x, y, y_pred, sample_weight), rows_share, known, added)
        return loss, terms, self._gradients(tape, loss)

    def _exact_pass(self, leaves: list[tf.Tensor]) -> Any:
        batch = cut(self._nested(leaves), max(1, self._rows // 3))
        update = _StillExactUpdate(self._model, batch, batch_norm_once=False, measured=False)
        sums = update.accumulate()
        scale = self._model.optimizer.scale_loss(tf.ones([]))
        return sums.loss, [gradient / tf.cast(scale, gradient.dtype) for gradient in sums.gradients]

    def _totals(self, y: Any, y_pred: Any, sample_weight: Any) -> tuple[tf.Tensor, ...]:
        if not self._counts:
            return ()
        return output_losses.denominators(self._model, (y, y_pred, sample_weight))

    def _terms(
        self, passed: Any, rows_share: tf.Tensor, totals: Sequence[tf.Tensor], added: list[Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what rows add to the loss of a batch, and to each of its terms."""
        model = self._model
        loss, outputs = output_losses.part_of_batch_loss(
            model, passed, rows_share=rows_share, totals=totals, added_losses=added
        )
        # How a `compute_loss` of the user's own takes what layers add, only its result tells.
        own = output_losses.has_own_loss(model)
        penalties = [] if own else output_losses.penalties(model, added, rows_share)
        terms = [tf.cast(one, tf.float32) for one in (*outputs, *penalties)]
        return loss, tf.stack(terms or [0.0])

    def _term_names(self) -> list[str]:
        names = [f"the loss {one.name or one.loss.name}" for one in output_losses_of(self._model)]
        if not output_losses.has_own_loss(self._model):
            adding = [
                f"the loss that {layer.name} ({type(layer).__name__}) adds"
                for layer in layers_of(self._model)
                for _ in added_by(layer)
            ]
            penalties = len(self._model.losses) - len(adding)
            names += [*adding, *(["a penalty on weights"] * penalties)]
        return _numbered(names or ["nothing"])

    def _gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[tf.Tensor]:
        variables = self._model.trainable_weights
        found = tape.gradient(loss, variables)
        return [
            tf.zeros(variable.shape) if one is None else tf.convert_to_tensor(one)
            for variable, one in zip(variables, found, strict=True)
        ]

    def _nested(self, leaves: list[tf.Tensor]) -> Any:
        rest = iter(leaves)
        return each_part(lambda _: next(rest), self._structure)


class _OwnPasses:
    """A batch sent through a `train_step` of the user's own: where it moves the weights.

    Optimizers move them by a constant times their gradients, so that moves add up as these do.
    """

    def __init__(self, model: Any, batch: Any):
        self._model, self._state = model, KeptState(model)
        self._weights = [one for one in model.weights if "float" in one.dtype]
        step: Any = user_step(model)
        step, size = _with_still_draws(step), max(1, len(parts_of(batch)[0]) // 3)
        spec = each_part(lambda x: tf.TensorSpec((None, *x.shape[1:]), tf.as_dtype(x.dtype)), batch)
        slope = _traced(
            model, lambda data: tf.linalg.global_norm(Collected(model, step, data).gradients), spec
        )
        norm = slope(each_part(tf.convert_to_tensor, batch))
        length = tf.linalg.global_norm([one.value for one in self._weights])
        rate = 3 * _MOVE * max(float(length), 1.0) / max(float(norm), 1e-30)  # Of all weights.

        def move(optimizer: Any, gradients: Any, variables: Any) -> None:
            for one, gradient in zip(variables or trained_by(optimizer), gradients, strict=True):
                if gradient is not None:
                    one.assign_sub(rate * tf.convert_to_tensor(gradient))

        def moving(data: Any, *, in_parts: bool) -> None:
            with replaced_applies(move):
                accumulate_step(model, step, data, size) if in_parts else step(data)

        whole = _traced(model, lambda data: moving(data, in_parts=False), spec)
        parts = _traced(model, lambda data: moving(data, in_parts=True), spec)
        self.whole = functools.partial(self._moves, whole)
        self.parts = functools.partial(self._moves, parts)

    def move(self, found: _Pass) -> None:
        """Start from where a step on the whole batch went."""
        self._state.restore()
        for one, move in zip(self._weights, found.gradients.values(), strict=True):
            one.assign_add(move)
        self._state = KeptState(self._model)

    def _moves(self, run: Callable[..., Any], batch: Any) -> _Pass:
        self._state.restore()
        before = [_wide(one.value) for one in self._weights]
        run(each_part(tf.convert_to_tensor, batch))
        moves = [_wide(one.value) - was for one, was in zip(self._weights, before, strict=True)]
        names = _numbered([f"the update of {one.path}" for one in self._weights])
        return _Pass({"the loss": 0.0}, dict(zip(names, moves, strict=True)))


def _traced(model: Any, function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    if model.run_eagerly:
        return function
    # A `tf.function` within the model would keep a graph that has the draws of this check.
    within = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        return tf.function(function, autograph=False).get_concrete_function(*signature)
    finally:
        tf.config.run_functions_eagerly(within)


def _numbered(names: Sequence[str]) -> list[str]:
    return [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]


def _largest_difference(whole: _Pass, parts: _Pass) -> tuple[float, str]:
    """Find what differs most; a loss term tells more than the gradients that follow from it."""
    scale = 1e-3 * max(*map(abs, whole.terms.values()), 1e-9)
    terms = [
        (abs(parts.terms[name] - term) / max(abs(term), scale), name)
        for name, term in whole.terms.items()
    ]
    norms = {name: float(np.linalg.norm(one)) for name, one in whole.gradients.items()}
    least = max(_SMALLEST_SHARE * float(np.linalg.norm(list(norms.values()))), 1e-30)
    gradients = [
        (float(np.linalg.norm(parts.gradients[name] - one)) / max(norms[name], least), name)
        for name, one in whole.gradients.items()
    ]
    found = [(np.inf if np.isnan(size) else size, name) for size, name in (*terms, *gradients)]
    largest = max(found)
    telling = max(found[1 : len(terms)], default=largest)
    return telling if telling[0] > EQUAL_UP_TO else largest


def _batches(rows: Any) -> list[Any]:
    """Make two batches: one from rows with little in them to rows with much, one as they come."""
    leaves = parts_of(rows)
    count = len(leaves[0])
    if count < 4:
        return [rows]
    # Padding is 0 and a missing label NaN or negative: where rows differ in them, parts do too.
    numbers = [leaf for leaf in map(np.asarray, leaves) if leaf.dtype.kind in "iufb"]
    filled = sum(((leaf > 0).reshape(count, -1).sum(1) for leaf in numbers), np.zeros(count))
    order = np.argsort(filled, kind="stable")
    half = count // 2
    chosen = (order[::2][:half], np.sort(order[1::2])[:half])
    return [each_part(lambda x, index=index: np.asarray(x)[index], rows) for index in chosen]


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Leave out TensorFloat-32, whose products differ by some 1e-3."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(allowed)


def _with_still_draws(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hold Keras's random draws still while a function runs, so that its passes compare.

    A draw of shape (rows, ...) depends on how many rows there are: a part of a batch never gets the
    draws that its rows have in the whole batch. So each row gets the same draw, and dropout keeps
    all. Nothing that is traced here may be used elsewhere.
    """

    def held(*args: Any) -> Any:
        seeds = itertools.count(1)

        def still(name: str, draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
            if name == "dropout":
                return lambda inputs, *args, **kwargs: inputs
            signature = inspect.signature(draw)

            def drawn(*args: Any, **kwargs: Any) -> tf.Tensor:
                call = signature.bind(*args, **kwargs)
                shape = call.arguments["shape"]
                sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
                call.arguments |= {"seed": next(seeds), "shape": [1, *sizes[1:]] if sizes else []}
                return tf.broadcast_to(draw(*call.args, **call.kwargs), sizes)

            return drawn

        with replaced_draws(("normal", "uniform", "truncated_normal", "randint", "dropout"), still):
            return function(*args)

    return held


class _StillExactUpdate(ExactUpdate):
    """The exact mode, each of whose passes has the draws of the whole batch."""

    def _outputs(self, x: Any) -> list[tf.Tensor]:
        return _with_still_draws(super()._outputs)(x)


# Of each of two batches; their parts have 2, 3 and 11. Fewer than four tell little.
_ROWS, _FEWEST_ROWS = 16, 4


class PartsChecks:
    """Compares batches whole and in parts, and remembers what was found."""

    def __init__(self):
        self._found: dict[str, PartsCheck] = {}

    def find(
        self,
        model: keras.Model,
        source: Source,
        *,
        most: int | None = None,
        directory: Path | None = None,
    ) -> PartsCheck:
        """Compare batches of a model, unless one of its kind was checked before."""
        versions = sorted(read_environment().versions.items())
        described = repr((model_fingerprint(model), row_shapes(source, model), versions))
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        path = directory and directory / "kbatch-micro-batches" / f"{key}-parts.json"
        known = self._found.get(key) or load_if_readable(PartsCheck, path)
        if known is None:
            rows = 2 * min(_ROWS, max(most or _ROWS, _FEWEST_ROWS))
            try:
                batch = batch_of(source, model, rows)
            except DataEnded as ended:
                if ended.rows < 1:
                    raise
                batch = batch_of(source, model, ended.rows)
            known = check_parts(model, batch)
            if path is not None:
                write_record(known, path)
        self._found[key] = known
        return known

    def may_cut(self, model: keras.Model, source: Source, *, directory: Path | None = None) -> bool:
        """Return whether kbatch may cut by itself: a step of the user's own if parts equal it."""
        if user_step(model) is None:
            return True
        return replica_count(model) == 1 and self.find(model, source, directory=directory).equal

    def difference(
        self,
        model: keras.Model,
        source: Source,
        *,
        most: int | None = None,
        directory: Path | None = None,
    ) -> RunNote | None:
        """Return why parts would train another model than the whole batch, or None."""
        parts = coupled_parts(model)
        if replica_count(model) == 1:
            check = self.find(model, source, most=most, directory=directory)
            if check.equal:
                return None
            if not parts:
                return check_note(check)
        return coupling_note(parts) if parts else None
