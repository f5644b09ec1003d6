"""Whether the parts of a batch train a model as the whole does: a check by value.

No list of layers and losses can tell: a loss that a layer adds may be a sum, a `call` may mix
rows. So batches go through whole, by Keras's own loss, and in parts of unequal size, and what
comes out is compared: with the weights as they are, and where they moved to.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.library_internals import (
    build_symbolically,
    compile_loss_of,
    layers_of,
    policy_of_layers,
)
from kbatch.page.numbers import format_number
from kbatch.records.notes import Note
from kbatch.training.accumulation.compared_passes import STILL_UP_TO, Pass, Passes
from kbatch.training.accumulation.gradient_sum import as_tensor
from kbatch.training.accumulation.train_step import AccumulatingTrainStep
from kbatch.training.data.forms import (
    FitData,
    each_part,
    is_composite,
    is_dataset,
    parts_of,
    row_count,
    rows_between,
)
from kbatch.training.data.sample_rows import sample_of
from kbatch.training.model import installed_step, replica_count
from kbatch.training.state import kept_state

# In float32 sums in another order differ by some 1e-6.
EQUAL_UP_TO = 1e-4
_MOVES = 3
# A gradient that is zero but for rounding, such as of a key's bias, is held against all others.
_SMALLEST_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class PartsCheck:
    """Whether the parts of a batch add up to the whole: its loss terms and its gradient."""

    #: Largest difference of a loss term, over its size; where none of them differs, of a variable's
    #: gradient, over its norm; where these agree, of a layer's state, over how far it went on.
    #: None where it could not be computed.
    difference: float | None
    where: str | None  #: The loss term or variable that differs most, None without a difference.
    reason: str | None  #: Why it could not be computed, else None.
    rows: int  #: Examples of each batch that was compared.
    #: What differs first: a "layer", the "loss" of an output, an "added" loss, the "state" that a
    #: layer keeps in its `call`, or None.
    source: str | None = None
    layer: str | None = None  #: The first layer whose values depend on other rows, with its class.

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
    def text(self) -> str:
        if self.difference is None:
            return f"no comparison with parts of it could be made ({self.reason})"
        percent = format_number(100 * self.difference, 2)
        text = f"{self.where} differed by {percent} % in a comparison on {self.rows} examples"
        return text + (f"; {self.layer} depends on other rows" if self.layer else "")

    @property
    def note(self) -> Note | None:
        """What it means for a batch that is cut, None where parts train as the whole does."""
        if self.equal:
            return None
        if self.difference is None:
            return Note.of("parts_not_compared", found=self.text)
        if self.layer is not None and self.layer.endswith("(BatchNormalization)"):
            found = dataclasses.replace(self, layer=None).text
            return Note.of("batch_normalization_in_parts", parts=f"{self.layer}; {found}")
        return Note.of("parts_differ", found=self.text, source=self.source)


def check_parts(model: keras.Model, rows: Any) -> PartsCheck:
    """Compare batches that go through whole and in parts, in float32 and without dropout."""
    batches = _batches(keras.utils.unpack_x_y_sample_weight(rows))
    count = int(row_count(batches[0]))
    if count < 2:
        return PartsCheck(None, None, "a batch of one example has no parts", count)
    compile_loss = compile_loss_of(model)
    try:
        if not (model.built and (compile_loss is None or compile_loss.built)):
            with model.distribute_strategy.scope():
                build_symbolically(model, each_part(as_tensor, batches[0]))
        # Rounding to half precision hides what is compared.
        halves = [layer for layer in layers_of(model) if "16" in (layer.compute_dtype or "")]
        with (
            model.distribute_strategy.scope(),
            kept_state(model),
            policy_of_layers(halves, "float32"),
            _exact_and_eager(),
        ):
            return _compared(model, batches)
    # Whatever a model raises here, training may raise as well, and says more.
    except Exception as error:
        return PartsCheck(None, None, failure_text(error), count)


def _compared(model: keras.Model, batches: Sequence[Any]) -> PartsCheck:
    count = int(row_count(batches[0]))
    passes = Passes(model, batches[0])
    first = passes.whole(batches[0])
    if not first.is_finite():
        return PartsCheck(None, None, "the loss or its gradient is not finite", count)
    again, _ = _largest_difference(first, passes.whole(batches[0]))
    if not again <= STILL_UP_TO:
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
    if where in first.state:
        return PartsCheck(difference, where, None, count, "state")
    source, layer = passes.sources.get(where), passes.first_layer_apart(batches[0])
    if layer is None and source is None:
        # A move may have taken back what the one before did, such as of a gate that was zero.
        passes.move(passes.whole(batches[0]))
        layer = passes.first_layer_apart(batches[0])
    return PartsCheck(difference, where, None, count, "layer" if layer else source, layer)


def _differences(passes: Passes, batches: Sequence[Any]) -> list[Any]:
    return [_largest_difference(passes.whole(one), passes.parts(one)) for one in batches]


def _largest_difference(whole: Pass, parts: Pass) -> tuple[float, str]:
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
    largest = telling if telling[0] > EQUAL_UP_TO else largest
    return largest if largest[0] > EQUAL_UP_TO else max(largest, *_states_apart(whole, parts))


def _states_apart(whole: Pass, parts: Pass) -> Iterator[tuple[float, str]]:
    """Yield how far apart the state of layers ends, over how far the whole takes it on."""
    yield 0.0, ""
    for name, (before, after) in whole.state.items():
        floor = max(_SMALLEST_SHARE * float(np.linalg.norm(before)), 1e-30)
        moved = max(float(np.linalg.norm(after - before)), floor)
        yield float(np.linalg.norm(parts.state[name][1] - after)) / moved, name


def _batches(rows: Any) -> list[Any]:
    """Make two batches: one from rows with little in them to rows with much, one as they come."""
    leaves, count = parts_of(rows), int(row_count(rows))
    if count < 4 or any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return [rows]
    # Padding is 0 and a missing label NaN or negative: where rows differ in them, parts do too.
    dense = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, tf.RaggedTensor)]
    numbers = [leaf for leaf in dense if leaf.dtype.kind in "iufb"]
    filled = sum(((leaf > 0).reshape(count, -1).sum(1) for leaf in numbers), np.zeros(count))
    order = np.argsort(filled, kind="stable")
    half = count // 2
    chosen = (order[::2][:half], np.sort(order[1::2])[:half])

    def picked(index: np.ndarray, leaf: Any) -> Any:
        ragged = isinstance(leaf, tf.RaggedTensor)
        return tf.gather(leaf, index) if ragged else np.asarray(leaf)[index]

    return [each_part(functools.partial(picked, index), rows) for index in chosen]


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


def rows_to_compare(micro_batch_size: int | None = None) -> int:
    """Return how many rows to compare where batches are cut into parts of a size."""
    # Two batches of up to 16, whose parts have 2, 3 and 11. Fewer than four tell little.
    return 2 * min(16, max(micro_batch_size or 16, 4))


def check_at_first_training(model: Any) -> None:
    """Let a model compare rows of the first data that it is given to train on, and warn."""
    for name in ("fit", "train_on_batch"):
        setattr(model, name, functools.partial(_checked_training, model, name))


def _checked_training(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    step = installed_step(model)
    size = step.how.micro_batch_size if isinstance(step, AccumulatingTrainStep) else None
    frozen = model.built and not model.trainable_weights
    names = list(inspect.signature(getattr(keras.Model, name)).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    check = None
    try:
        rows, at_once = _first_rows(given, batched=name == "train_on_batch")
        if size is not None and not frozen and at_once > size * replica_count(model):
            most = min(rows_to_compare(size), int(row_count(rows)))
            some = each_part(lambda leaf: rows_between(leaf, 0, most), rows)
            check = check_parts(model, some)
    # Data in which this finds no rows `fit` may take all the same.
    except Exception as error:
        check = PartsCheck(None, None, failure_text(error), 0)
    if check is not None:
        for own, hook in list(vars(model).items()):
            if getattr(hook, "func", None) is _checked_training:
                del vars(model)[own]
        if (note := check.note) is not None:
            warnings.warn(note, stacklevel=2)
        if isinstance(step, AccumulatingTrainStep):
            step.warn_of_metrics()
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
    batch = each_part(lambda part: part if is_composite(part) else np.asarray(part), batch)
    return batch, int(row_count(batch))
