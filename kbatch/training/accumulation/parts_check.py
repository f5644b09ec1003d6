"""Whether the parts of a batch train a model as the whole does: a check by value.

No list of layers and losses can tell: a loss that a layer adds may be a sum, a `call` may mix
rows. So batches go through whole, by Keras's own loss, and in parts of unequal size, and what
comes out is compared: with the weights as they are, and where they moved to.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.environment import read_environment
from kbatch.document.numbers import format_number
from kbatch.library_internals import (
    added_by,
    build_symbolically,
    compile_loss_of,
    compute_loss,
    forward,
    layers_of,
    observed_calls,
    output_losses_of,
    policy_of_layers,
    replaced_applies,
    replaced_draws,
    trained_by,
)
from kbatch.records.json_codec import load_if_readable, write_record
from kbatch.records.notes import RunNote
from kbatch.training.accumulation import output_losses
from kbatch.training.accumulation.exact import ExactUpdate
from kbatch.training.accumulation.gradient_sum import cut
from kbatch.training.accumulation.train_step import Collected, accumulate_step
from kbatch.training.clock import replica_count
from kbatch.training.data.forms import FitData, each_part, is_dataset, parts_of
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of, row_shapes, sample_of
from kbatch.training.fingerprint import function_code, model_fingerprint
from kbatch.training.model import installed_step, user_step
from kbatch.training.state import KeptState, kept_state

# In float32 sums in another order differ by some 1e-6.
EQUAL_UP_TO = 1e-4
_MOVES = 3
# Of the norm of a variable: far enough that what was zero at first counts.
_MOVE = 0.03
# A gradient that is zero but for rounding, such as of a key's bias, is held against all others.
_SMALLEST_SHARE = 0.01
# A GPU adds up in an order of its own each time: two runs of the whole differ by some 1e-6, and
# what differs by less than a tenth of what counts as equal leaves the comparison its meaning.
_STILL_UP_TO = EQUAL_UP_TO / 10


@dataclasses.dataclass(frozen=True)
class PartsCheck:
    """Whether the parts of a batch add up to the whole: its loss terms and its gradient.

    Attributes:
        difference: Largest difference of a loss term, over its size; where none of them differs,
            of a variable's gradient, over its norm. None where it could not be computed.
        where: The loss term or variable that differs most, None without a difference.
        reason: Why it could not be computed, else None.
        rows: Examples of each batch that was compared.
        source: What differs first: a "layer", the "loss" of an output, an "added" loss, or None.
        layer: The first layer whose values depend on other rows, with its class.
        exact_difference: As `difference`, where the parts go through in the exact mode; None
            where parts do not differ without it, or where it could not be computed.
    """

    difference: float | None
    where: str | None
    reason: str | None
    rows: int
    source: str | None = None
    layer: str | None = None
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

    @property
    def text(self) -> str:
        """What was found, in a clause."""
        if self.difference is None:
            return f"no comparison with parts of it could be made ({self.reason})"
        percent = format_number(100 * self.difference, 2)
        text = f"{self.where} differed by {percent} % in a comparison on {self.rows} examples"
        return text + (f"; {self.layer} depends on other rows" if self.layer else "")

    @property
    def note(self) -> RunNote | None:
        """What it means for a batch that is cut, None where parts train as the whole does."""
        if self.equal:
            return None
        if self.difference is None:
            return RunNote.of("parts_not_compared", found=self.text)
        if self.layer is not None and self.layer.endswith("(BatchNormalization)"):
            found = dataclasses.replace(self, layer=None).text
            return RunNote.of("batch_normalization_in_parts", parts=f"{self.layer}; {found}")
        return RunNote.of("parts_differ", found=self.text, source=self.source)


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
    if own and replica_count(model) > 1:
        return PartsCheck(None, None, "a `train_step` of its own on several replicas", count)
    compile_loss = compile_loss_of(model)
    try:
        if not own and not (model.built and (compile_loss is None or compile_loss.built)):
            with model.distribute_strategy.scope():
                build_symbolically(model, each_part(tf.convert_to_tensor, batches[0]))
        # Rounding to half precision hides what is compared.
        halves = [layer for layer in layers_of(model) if "16" in (layer.compute_dtype or "")]
        with (
            model.distribute_strategy.scope(),
            kept_state(model),
            policy_of_layers(halves, "float32"),
            _exact_and_eager(),
        ):
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
    differences = _differences(passes, batches)
    for _ in range(_MOVES):
        passes.move(first)
        first = passes.whole(batches[0])
    if first.is_finite():
        differences += _differences(passes, batches)
    # At first predictions may be alike for all rows, so that only gradients differ.
    of_terms = [one for one in differences if one[0] > EQUAL_UP_TO and one[1] in passes.sources]
    difference, where = max(of_terms or differences)
    if not np.isfinite(difference):
        reason = f"{where} is not finite on a part: it may divide by 0, see `loss_denominator`"
        return PartsCheck(None, None, reason, count)
    if difference <= EQUAL_UP_TO:
        return PartsCheck(difference, where, None, count)
    if not isinstance(passes, _Passes):
        return PartsCheck(difference, where, None, count)
    layer = passes.first_layer_apart(batches[0])
    if layer is None and where not in passes.sources:
        # A move may have taken back what the one before did, such as of a gate that was zero.
        passes.move(passes.whole(batches[0]))
        layer = passes.first_layer_apart(batches[0])
    source = "layer" if layer else passes.sources.get(where)
    exact = _exact_difference(passes, batches)
    return PartsCheck(difference, where, None, count, source, layer, exact)


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
        self._rows = len(parts_of(batch)[0])
        self._exact: Callable[..., Any] | None = None
        self.sources: dict[str, str] = {}  # "loss" or "added", by name of a term.
        shapes = [(tf.as_dtype(leaf.dtype), (None, *leaf.shape[1:])) for leaf in parts_of(batch)]
        self._specs = specs = [tf.TensorSpec(shape, dtype) for dtype, shape in shapes]
        share, totals = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
        self._whole = _traced(model, self._whole_pass, specs)
        self._count = _traced(model, self._counting_pass, specs) if self._counts else None
        self._part = _traced(model, self._part_pass, specs, share, totals)

    def whole(self, batch: Any) -> _Pass:
        """Send a batch through as Keras's own train step does."""
        with self._kept_statistics():
            return self._pass(*self._whole(parts_of(batch)))

    def parts(self, batch: Any) -> _Pass:
        """Send a batch through in three parts, and add them up."""
        parts, rows = _parts(batch), len(parts_of(batch)[0])
        totals = tf.zeros([0])
        if self._count is not None:
            with self._kept_statistics():
                totals = tf.add_n([self._count(part) for part in parts])
        terms = 0.0
        gradients: list[Any] = [0.0] * len(self._model.trainable_variables)
        with self._kept_statistics():
            for part in parts:
                share = tf.constant(len(part[0]) / rows, tf.float32)
                its_terms, its_gradients = self._part(part, share, totals)
                terms = terms + _wide(its_terms)
                gradients = [a + _wide(b) for a, b in zip(gradients, its_gradients, strict=True)]
        return self._pass(terms, gradients)

    def first_layer_apart(self, batch: Any) -> str | None:
        """Name the first layer whose values differ in parts, None where none does."""
        seen: list[list[tuple[Any, list[Any]]]] = []

        def see(layer: Any, values: Any) -> None:
            tensors = [one for one in parts_of(values) if isinstance(one, tf.Tensor)]
            seen[-1].append((layer, [_wide(one) for one in tensors if one.dtype.is_floating]))

        for pieces in ([parts_of(batch)], _parts(batch)):
            with self._kept_statistics(), observed_calls(self._model, see):
                for leaves in pieces:
                    seen.append([])
                    with _still_draws():
                        forward(self._model, self._nested(leaves)[0], training=True)
        whole, *parts = seen
        for (layer, values), *others in zip(whole, *parts, strict=False):
            for value, *pieces in zip(values, *(found for _, found in others), strict=False):
                joined = np.concatenate(pieces) if value.ndim else value
                distance = joined.shape == value.shape and np.linalg.norm(joined - value)
                if distance > _STILL_UP_TO * np.linalg.norm(value):
                    return f"{layer.name} ({type(layer).__name__})"
        return None

    def exact(self, batch: Any) -> _Pass:
        """Send a batch through in three parts, by the loss of the whole."""
        if self._exact is None:
            self._exact = _traced(self._model, self._exact_pass, self._specs)
        with self._kept_statistics():
            return self._pass(*self._exact(parts_of(batch)))

    def move(self, found: _Pass) -> None:
        """Move the weights down the gradient, each by a share of its norm."""
        for variable, gradient in zip(
            self._model.trainable_variables, found.gradients.values(), strict=True
        ):
            value = np.asarray(tf.convert_to_tensor(variable.value), np.float64)
            length = _MOVE * max(np.linalg.norm(value), 1.0)
            variable.assign(value - length * gradient / max(np.linalg.norm(gradient), 1e-30))

    def _pass(self, terms: Any, gradients: Sequence[Any]) -> _Pass:
        names = _numbered([f"the gradient of {v.path}" for v in self._model.trainable_variables])
        return _Pass(
            # The exact mode has no terms but the loss.
            dict(zip(self.sources, map(float, _wide(terms)), strict=False)),
            dict(zip(names, map(_wide, gradients), strict=True)),
        )

    @contextlib.contextmanager
    def _kept_statistics(self) -> Iterator[None]:
        kept = [tf.identity(one.value) for one in self._state]
        yield
        for variable, value in zip(self._state, kept, strict=True):
            variable.assign(value)

    def _whole_pass(self, leaves: list[Any]) -> Any:
        x, y, sample_weight = self._nested(leaves)
        with _still_draws(), tf.GradientTape() as tape:
            y_pred = forward(self._model, x, training=True)
            added = list(self._model.losses)
            loss = compute_loss(self._model, x, y, y_pred, sample_weight)
        gradients = self._gradients(tape, loss)
        totals: tuple[tf.Tensor, ...] = ()
        if self._counts:
            totals = output_losses.denominators(self._model, (y, y_pred, sample_weight))
        _, terms = self._terms((x, y, y_pred, sample_weight), tf.ones([]), totals, added)
        self.sources = self._named_terms()
        return tf.stack([tf.cast(loss, tf.float32), *terms]), gradients

    def _counting_pass(self, leaves: list[Any]) -> tf.Tensor:
        x, y, sample_weight = self._nested(leaves)
        with _still_draws():
            y_pred = forward(self._model, x, training=True)
            return tf.stack(output_losses.denominators(self._model, (y, y_pred, sample_weight)))

    def _part_pass(self, leaves: list[Any], rows_share: tf.Tensor, totals: tf.Tensor) -> Any:
        x, y, sample_weight = self._nested(leaves)
        outputs = output_losses.output_count(self._model) if self._counts else 0
        known = [totals[i] for i in range(outputs)]
        with _still_draws(), tf.GradientTape() as tape:
            y_pred = forward(self._model, x, training=True)
            added = list(self._model.losses)
            loss, terms = self._terms((x, y, y_pred, sample_weight), rows_share, known, added)
        return tf.stack([tf.cast(loss, tf.float32), *terms]), self._gradients(tape, loss)

    def _exact_pass(self, leaves: list[Any]) -> Any:
        batch = cut(self._nested(leaves), max(1, self._rows // 3))
        update = _StillExactUpdate(self._model, batch, batch_norm_once=False, measured=False)
        sums = update.accumulate()
        scale = self._model.optimizer.scale_loss(tf.ones([]))
        gradients = [gradient / tf.cast(scale, gradient.dtype) for gradient in sums.gradients]
        return tf.stack([tf.cast(sums.loss, tf.float32)]), gradients

    def _terms(
        self, passed: Any, rows_share: tf.Tensor, totals: Sequence[tf.Tensor], added: list[Any]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return what rows add to the loss of a batch, and to each of its terms."""
        model = self._model
        loss, outputs = output_losses.part_of_batch_loss(
            model, passed, rows_share=rows_share, totals=totals, added_losses=added
        )
        # How a `compute_loss` of the user's own takes what layers add, only its result tells.
        own = output_losses.has_own_loss(model)
        penalties = [] if own else output_losses.penalties(model, added, rows_share)
        return loss, [tf.cast(one, tf.float32) for one in (*outputs, *penalties)]

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

    def _gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[tf.Tensor]:
        variables = self._model.trainable_weights
        # Outside of the replicas a variable of a strategy is read from its first device.
        copies_of = self._model.distribute_strategy.experimental_local_results
        found = tape.gradient(loss, [copies_of(variable.value)[0] for variable in variables])
        return [
            tf.zeros(variable.shape) if one is None else tf.convert_to_tensor(one)
            for variable, one in zip(variables, found, strict=True)
        ]

    def _nested(self, leaves: list[Any]) -> Any:
        rest = iter(leaves)
        return each_part(lambda _: tf.convert_to_tensor(next(rest)), self._structure)


def _parts(batch: Any) -> list[list[Any]]:
    """Cut a batch into three parts of unequal size."""
    leaves = parts_of(batch)
    rows = len(leaves[0])
    cuts = sorted({0, max(1, rows // 8), max(1, rows // 3), rows})
    return [[leaf[a:b] for leaf in leaves] for a, b in itertools.pairwise(cuts)]


class _OwnPasses:
    """A batch sent through a `train_step` of the user's own: where it moves the weights.

    Optimizers move them by a constant times their gradients, so that moves add up as these do.
    """

    def __init__(self, model: Any, batch: Any):
        self._model, self._state = model, KeptState(model)
        self._weights = [one for one in model.weights if "float" in one.dtype]
        self.sources: dict[str, str] = {}  # Of its loss nothing is known.
        own: Any = user_step(model)
        size = max(1, len(parts_of(batch)[0]) // 3)

        def step(data: Any) -> Any:
            with _still_draws():
                return own(data)

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
    """Trace a pass for any number of rows."""
    if model.run_eagerly:
        return function
    return tf.function(function, autograph=False).get_concrete_function(*signature)


def _numbered(names: Sequence[str]) -> list[str]:
    return [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]


def _differences(passes: "_Passes | _OwnPasses", batches: Sequence[Any]) -> list[Any]:
    return [_largest_difference(passes.whole(one), passes.parts(one)) for one in batches]


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


def _still_draws() -> contextlib.AbstractContextManager[None]:
    """Hold Keras's random draws still for one pass: each row gets the same, dropout keeps all.

    A draw depends on how many rows there are: a part never gets those that its rows have in whole.
    """
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

    return replaced_draws(("normal", "uniform", "truncated_normal", "randint", "dropout"), still)


class _StillExactUpdate(ExactUpdate):
    """The exact mode, each of whose passes has the draws of the whole batch."""

    def _outputs(self, x: Any) -> list[tf.Tensor]:
        with _still_draws():
            return super()._outputs(x)


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
        given = getattr(installed_step(model), "loss_denominator", None)
        divided = keras.tree.map_structure(function_code, given) if given else None
        described = repr((model_fingerprint(model), row_shapes(source, model), versions, divided))
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
        return user_step(model) is None or self.find(model, source, directory=directory).equal


def check_at_first_training(model: Any) -> None:
    """Let a model compare rows of the first data that it is given to train on, and warn."""
    for name in ("fit", "train_on_batch"):
        setattr(model, name, functools.partial(_checked_training, model, name))


def _checked_training(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    size = getattr(installed_step(model), "micro_batch_size", math.inf)
    names = list(inspect.signature(getattr(keras.Model, name)).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    check = None
    try:
        rows, at_once = _first_rows(given, batched=name == "train_on_batch")
        if at_once > size * replica_count(model):
            most = 2 * min(_ROWS, max(size, _FEWEST_ROWS))
            check = check_parts(model, each_part(lambda leaf: leaf[:most], rows))
    # Data in which this finds no rows `fit` may take all the same.
    except Exception as error:
        check = PartsCheck(None, None, f"{type(error).__name__}: {error}"[:300], 0)
    if check is not None:
        for own, hook in list(vars(model).items()):
            if getattr(hook, "func", None) is _checked_training:
                del vars(model)[own]
        exact = getattr(installed_step(model), "exact", False)
        if (note := check.note) is not None and not (exact and check.repaired):
            warnings.warn(note, stacklevel=2)
    if "x" in kwargs:
        kwargs["x"] = given["x"]
    elif args and "x" in given:
        args = (given["x"], *args[1:])
    return getattr(type(model), name)(model, *args, **kwargs)


def _first_rows(given: dict[str, Any], *, batched: bool) -> tuple[Any, int]:
    """Return some rows of what training is given, and how many there are in a batch."""
    x: Any = given.get("x")
    if inspect.isgenerator(x):
        batch = next(x)
        given["x"] = (one for one in itertools.chain([batch], x))
    elif isinstance(x, keras.utils.PyDataset) or is_dataset(x):
        batch = next(iter(x)) if is_dataset(x) else x[0]
    else:
        sample: Any = sample_of(FitData(**{k: given[k] for k in FitData._fields if k in given}))
        return sample.rows, sample.examples if batched else given.get("batch_size") or 32
    batch = each_part(np.asarray, batch)
    return batch, len(parts_of(batch)[0])
