"""The first updates of a search: what they take, whether mixed_float16 pays, and what overflows.

A plan follows from them. They are made on rows of the data and without `fit`, which takes longer
than some small steps, and leave nothing of a model changed but its graph, by which it then trains.
Later training runs that diverge or lose updates are explained here too.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import MEMORY_ERRORS, device_is_lost, ran_out_of_memory
from kbatch.errors import DataEnded, DeviceLostError, PolicyUnsupported
from kbatch.library_internals import compute_loss, forward, replaced_layer_calls
from kbatch.memory.workload import Workload
from kbatch.page.numbers import pluralize
from kbatch.records.machine import SHORTEST_S
from kbatch.records.notes import Note
from kbatch.records.training_run import EpochRecord
from kbatch.training.data.batches import endless, of_any_length
from kbatch.training.data.forms import is_dataset
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import (
    check_loss_is_scaled,
    dtype_policy_scope,
    overflows,
    skips_all_updates,
)
from kbatch.training.model import installed_step, is_compiled, loss_scaled, replica_count, user_step
from kbatch.training.state import assign, copies_of, kept_state
from kbatch.training.step_call import StepCall
from kbatch.training.steps_per_execution import set_steps

# Examples of an update. The first updates have few: a processor that is slow in float16 would take
# minutes for more.
FEW, SOME = 2, 32
# Each update that overflows halves the loss scale; it may be too large at first this many times.
_MOST_TRIES = 20
# How many updates are timed together, where one takes no longer than these seconds.
_TOGETHER, _TOGETHER_S = 8, 0.05
# One that takes longer, but not that long, may have been disturbed: so often it is made again.
_AGAIN, _SURELY_LONG_S = 3, 0.5
TOO_SLOW = 2.0  # Times as long as in float32, on a processor.
# Seconds of updates: fewer examples are timed where they take longer.
_LONG_S, _LONGEST_S = 0.03, 0.2
_ROUNDS_AHEAD, _MOST_ROUNDS = 2, 5


class Updates:
    """Updates of a model on rows of its data."""

    def __init__(
        self,
        model: Any,
        data: TrainingData,
        *,
        counted: bool = False,
        compiled: bool = True,
        whole: int | None = None,  # The only number of rows that the model takes.
    ):
        self._whole = whole
        self._compiled = compiled  # By XLA, if it compiles the model.
        self.model, self._replicas = model, replica_count(model)
        policy = model.dtype_policy.name
        self.run = Workload(lambda: model, data, policy, replicas=self._replicas).start()
        self.seconds: dict[int, float] = {}  # Of a step, by rows.
        self.first_s: dict[int, float] = {}  # Of the first one, which XLA may compile.
        self._peak_bytes: dict[int, int] = {}  # By rows.
        # How often the loss scale was halved before an update, by rows; None where it never made
        # one.
        self._overflows: dict[int, int | None] = {}
        self._batches: dict[int, Any] = {}  # Endless iterators of one batch, by rows.
        if counted:  # How many steps an execution runs is chosen later.
            set_steps(model, int(model.steps_per_execution))
        model.make_train_function()  # What is traced here serves whoever trains the model.

    def step_s(self, rows: int) -> float:
        """Time an update on so many rows, after a first one that may be traced."""
        rows = self._whole or rows
        try:
            return self._step_s(rows)
        except MEMORY_ERRORS as error:
            # XLA on a CPU frees the weights that it was to update if it runs out.
            on_cpu = self.run.memory.device == "CPU:0"
            freed = on_cpu and is_compiled(self.model) and ran_out_of_memory(error)
            if freed or device_is_lost(error):
                raise DeviceLostError() from error
            raise

    def _step_s(self, rows: int) -> float:
        model = self.model
        with dtype_policy_scope(model.dtype_policy.name), kept_state(model) as state:
            step = StepCall(model, state)
            full_rows = getattr(installed_step(model), "full_rows", None)
            if full_rows is not None:
                full_rows.assign(rows if self._compiled else 0)
            if rows not in self._overflows:
                began_s = time.perf_counter()
                self._begin(rows, step)
                self.first_s[rows] = time.perf_counter() - began_s
            batches = self._batches[rows]
            self.run.memory.reset()
            step_s = _execution_s(step, batches)
            for _ in range(_AGAIN):
                if _TOGETHER_S / 2 < step_s < _SURELY_LONG_S:
                    step_s = min(step_s, _execution_s(step, batches))
            together = min(_TOGETHER, int(_TOGETHER_S / step_s))
            if together > 1:
                step_s = min(step_s, _execution_s(step, batches, together) / together)
            peak = max(self.run.memory.peak_bytes, self.run.variables_bytes(), 1)
            self._peak_bytes[rows] = max(peak, self._peak_bytes.get(rows, 0))
        self.seconds[rows] = min(step_s, self.seconds.get(rows, step_s))
        return step_s

    def peak_bytes(self, rows: int) -> int | None:
        """Return the most memory that updates on so many rows take, None where it ran out."""
        rows = self._whole or rows
        try:
            if rows not in self._peak_bytes:
                self.step_s(rows)
        except DataEnded:  # A data function has fewer.
            return None
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self._peak_bytes)):
                raise
            return None
        return self._peak_bytes[rows]

    def check(self, rows: int, largest_batch_size: int) -> None:
        """Check that an epoch makes an update, which overflows of float16 may delay."""
        rows = self._whole or rows
        if rows not in self._overflows:
            self.step_s(rows)
        known, found = self.run.examples, self._overflows[rows]
        if found is None:
            raise PolicyUnsupported("the gradients of every batch overflowed in float16")
        if known is not None and found * largest_batch_size >= known:
            raise PolicyUnsupported(f"the first {found} batches overflowed in float16")

    def _begin(self, rows: int, step: StepCall) -> None:
        """Make the first update on so many rows, and others as long as they overflow."""
        strategy = self.model.distribute_strategy
        batch = self.run.data.sample(rows * self._replicas, self.model, fewest=1)
        with tf.device("CPU:0"):  # Whatever device holds the batch.
            batches = endless(keras.tree.lists_to_tuples(batch))
        # The graph of training takes it, as its spec is that of all batches.
        spec = batches.element_spec
        spec = spec if self._whole else tf.nest.map_structure(of_any_length, spec)
        variant = tf.data.experimental.to_variant(batches)
        batches = tf.data.experimental.from_variant(variant, spec)
        if self._replicas > 1:
            batches = strategy.experimental_distribute_dataset(batches)
        self._batches[rows] = iter(batches)
        tries = 0
        while not tries or (tries < _MOST_TRIES and skips_all_updates(self.model)):
            step.execute(self._batches[rows], 1)
            tries += 1
        check_loss_is_scaled(self.model)
        failed = skips_all_updates(self.model)
        self._overflows[rows] = None if failed else overflows(self.model)


def _execution_s(step: StepCall, batches: Any, steps: int = 1) -> float:
    """Return the seconds of some steps, run as one execution where the model can."""
    begun_s = time.perf_counter()
    step.execute(batches, steps)
    return max(SHORTEST_S, time.perf_counter() - begun_s)


def check_half(
    half: Updates, full: Callable[[], Updates], batch_sizes: Sequence[int], *, timed: bool
) -> float | None:
    """Check that a search can train under mixed_float16.

    `full` returns what makes the updates in float32.

    Returns:
        How many times as long an update takes as in float32. If not `timed`, None.

    Raises:
        PolicyUnsupported: If a trial could not train.
    """
    largest, found = batch_sizes[-1], None
    rows = half.run.data.largest_rows(EXACT, half.model)
    if rows is not None:
        check_large_inputs(half.model, full().model, rows)
    half.check(FEW, largest)
    if timed:
        found = slowdown(half.step_s, full().step_s, batch_sizes[len(batch_sizes) // 2])
        if found > TOO_SLOW:
            return found
    # A loss that is a sum overflows with more examples.
    if half.peak_bytes(min(SOME, largest)) is not None:
        half.check(min(SOME, largest), largest)
    return found


def slowdown(
    half_s: Callable[[int], float], full_s: Callable[[int], float], batch_size: int
) -> float:
    """Return how many times as long an update takes under mixed_float16, timed in turns.

    `half_s` and `full_s` return the seconds of an update on so many rows under the two policies.
    If memory runs out, they make updates on half as many rows.
    """
    try:
        return _slowdown(half_s, full_s, batch_size)
    except MEMORY_ERRORS as error:
        if batch_size <= FEW or not ran_out_of_memory(error, smaller_worked=True):
            raise
    return slowdown(half_s, full_s, max(FEW, batch_size // 2))


def _slowdown(
    half_s: Callable[[int], float], full_s: Callable[[int], float], batch_size: int
) -> float:
    few_s = half_s(FEW)
    if few_s > max(_LONG_S, TOO_SLOW * (few_full_s := full_s(FEW))):
        return few_s / few_full_s
    most = SOME * _LONGEST_S / half_s(min(batch_size, SOME))
    rows = min(batch_size, max(SOME, int(most)))
    ratios: list[float] = []
    ahead = 0  # Rounds that say so, less those that do not.
    while abs(ahead) < _ROUNDS_AHEAD and len(ratios) < _MOST_ROUNDS:
        ratios.append(half_s(rows) / full_s(rows))
        ahead += 1 if ratios[-1] > TOO_SLOW else -1
    return statistics.median(ratios)


# A loss scale of 2^15 is halved at most this often until it is 1: more overflows are not a start.
_STARTS = 15
# Losses of updates are rare beyond the start: Keras doubles the scale every 2,000 updates.
_RARE = 1 / 200


def lost_updates(model: Any, epochs: Sequence[EpochRecord]) -> int:
    """Count the updates that overflowed; 0 if they only let the loss scale find its level."""
    batches = [epoch.batches or 0 for epoch in epochs]
    lost = [max(0, n - epoch.updates) for n, epoch in zip(batches, epochs, strict=True)]
    # The start is over after the first epoch of which most batches made an update.
    start = next((k + 1 for k, n in enumerate(batches) if 2 * lost[k] <= n), len(lost))
    # Keras lowers the scale for some epochs while the gradients grow.
    half = max(start, len(lost) // 2)
    later, in_each = sum(lost[half:]), len(lost) > 2 and min(lost) > 0
    often = later > _RARE * sum(batches[half:]) and (in_each or later > 3)
    made = sum(batches) - sum(lost)
    # In one epoch the counter of the loss scale, which each overflow resets, shows the last one.
    since = int(model.optimizer.step_counter) if model.optimizer.built else made
    late = len(lost) == 1 and lost[0] > 3 and lost[0] > _RARE * made and 2 * since < made > 20
    return sum(lost) if often or late or sum(lost[:start]) > _STARTS else 0


def overflow_text(model: Any, epochs: Sequence[EpochRecord]) -> str | None:
    """Say what float16 did to a training with a loss scale; None if it did no harm."""
    if not loss_scaled(model) or user_step(model) is not None:
        return None
    if lost := lost_updates(model, epochs):
        return f"{lost:,} of {sum(one.batches or 0 for one in epochs):,} updates were lost"
    floats = [weight for weight in model.weights if "float" in weight.dtype]
    bad = [w for w in floats if not bool(tf.reduce_all(tf.math.is_finite(w.value)))]
    return f"the weight {bad[0].path!r} became NaN or infinite" if bad else None


# Rows of a batch that is looked at, and the seconds after which no further batch is.
_ROWS, _LOOKED_S = 256, 2.0


def why_not_finite(model: Any, data: TrainingData) -> Note | None:
    """Find what is not finite: data, or what a layer or the loss makes of them.

    The model trains for some updates if nothing is found before. If it is none of these, return
    None.
    """
    found = data.batches(_ROWS, model, seed=None, validation_batch_size=_ROWS)
    counts: dict[str, list[int]] = {}
    part, until_s = None, time.monotonic() + _LOOKED_S
    for where, dataset in (("", found.dataset), ("validation ", found.validation_data)):
        for element in dataset if is_dataset(dataset) else ():
            bad = 0
            for name, leaf in _named_parts(element):
                count, rows = counts.setdefault(where + name, [0, 0]), len(leaf)
                finite = np.isfinite(leaf.numpy().astype("float64")).reshape(rows, -1).all(1)
                bad += rows - int(finite.sum())
                count[:] = count[0] + rows - int(finite.sum()), count[1] + rows
            if part is None and not bad:
                part = first_not_finite(model, element)
            if time.monotonic() > until_s:
                break
    if any(bad for bad, _ in counts.values()):
        texts = [f"{bad:,} of {n:,} rows of {name}" for name, (bad, n) in counts.items() if bad]
        return Note.of("data_not_finite", found=" and ".join(texts))
    updates = 0
    if part is None:
        part, updates = _after_updates(model, found.dataset)
    if part is None:
        return None
    when = f"after {pluralize(updates, 'update')}" if updates else "before the first update"
    return Note.of("part_not_finite", part=part, policy=model.dtype_policy.name, when=when)


# Updates that are tried, and the largest weight with which a learning rate has not diverged.
_MOST_UPDATES, _LARGEST_WEIGHT = 200, 1e4


def _after_updates(model: Any, dataset: Any) -> tuple[str | None, int]:
    """Train until the loss is not finite; name what makes it so, and return the updates before."""
    until_s = time.monotonic() + _LOOKED_S
    if user_step(model) is not None or not model.built:
        return None, 0
    with dtype_policy_scope(model.dtype_policy.name):
        for made, batch in enumerate(dataset.repeat().take(_MOST_UPDATES)):
            weights = copies_of(model.weights)
            model.reset_metrics()
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            logs: Any = model.train_on_batch(x, y, weight, return_dict=True)
            if not np.isfinite(logs["loss"]):
                small = all(np.abs(one).max(initial=0) < _LARGEST_WEIGHT for one in weights)
                assign(model.weights, weights)
                return (first_not_finite(model, batch) if small else None), made
            if time.monotonic() > until_s:
                break
    return None, 0


def _named_parts(element: Any) -> Iterator[tuple[str, Any]]:
    """List the parts of a batch that are floats, each with the name of its argument."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element)
    waiting = [("`x`", x), ("`y`", y), ("`sample_weight`", weight)]
    while waiting:
        name, part = waiting.pop(0)
        if isinstance(part, Mapping):
            waiting += [(f"{name}[{key!r}]", one) for key, one in part.items()]
        elif isinstance(part, (list, tuple)):
            waiting += [(f"{name}[{place}]", one) for place, one in enumerate(part)]
        elif isinstance(part, tf.Tensor) and part.dtype.is_floating and part.shape.rank:
            yield name, part


def first_not_finite(model: Any, batch: Any) -> str | None:
    """Name the layer or loss that first makes finite values infinite or NaN on a batch."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    names: list[str] = []

    def look(layer: Any, plain: Any, *arguments: Any, **named: Any) -> Any:
        outputs = plain(*arguments, **named)
        if not names and not _all_finite(outputs):
            names.append(f"layer {layer.name!r}")
        return outputs

    try:
        with dtype_policy_scope(model.dtype_policy.name), replaced_layer_calls(look):
            outputs = forward(model, x, training=False)
            if not names and y is not None:
                loss = compute_loss(model, x, y, outputs, weight)
                if not bool(tf.reduce_all(tf.math.is_finite(loss))):
                    name = getattr(model.loss, "name", getattr(model.loss, "__name__", None))
                    names.append(f"the loss {name or model.loss!r}")
    except Exception:  # A model of the user's own may train without a `call` or a loss.
        return None
    return next(iter(names), None)


def _all_finite(outputs: Any) -> bool:
    floats = [one for one in keras.tree.flatten(outputs) if isinstance(one, tf.Tensor)]
    floats = [one for one in floats if one.dtype.is_floating]
    # A mask of -inf is no overflow.
    return not any(bool(tf.reduce_any(tf.math.is_nan(one) | (one == np.inf))) for one in floats)


# Float16 rounds whole numbers above this, and larger ones than the second are infinite.
EXACT, _LARGEST = 2048, 65_504
# A change of outputs, as a share of their spread, that no rounding of a measurement causes.
_OTHER = 0.05


def check_large_inputs(half: Any, full: Any, batch: Any) -> None:
    """Check that inputs above 2,048 mean the same under mixed_float16 as in float32.

    Raises:
        PolicyUnsupported: If they overflow, or if they are rounded as ids must not be.
    """
    part = first_not_finite(half, batch)
    if part is not None and first_not_finite(full, batch) is None:
        raise PolicyUnsupported(f"{part} overflows in float16, whose largest number is 65,504")
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    rounded = keras.tree.map_structure(_rounded, x)
    exact, changed = _outputs_of(full, x), _outputs_of(full, rounded)
    if exact is None or not np.isfinite(exact).all():
        return
    # A float id that is rounded up may lie beyond the last row of an `Embedding`.
    differs = changed is None
    if changed is not None:
        spread = np.abs(exact - exact.mean(0)).mean()
        differs = np.abs(exact - changed).mean() > _OTHER * spread
    halved, others = _outputs_of(half, x), _outputs_of(half, rounded)
    rounds = halved is None or (others is not None and np.array_equal(halved, others))
    if differs and rounds:
        raise PolicyUnsupported(
            "float16 rounds inputs above 2,048, and the outputs depend on the digits that are "
            'lost. If these numbers are ids, give integers: `x.astype("int32")`'
        )


def _rounded(leaf: Any) -> Any:
    floats = isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
    whole = tf.clip_by_value(leaf, -_LARGEST, _LARGEST) if floats else leaf
    return tf.cast(tf.cast(whole, tf.float16), leaf.dtype) if floats else leaf


def _outputs_of(model: Any, x: Any) -> np.ndarray | None:
    """Return the outputs as a row for each example. If the model cannot be called, return None."""
    try:
        with dtype_policy_scope(model.dtype_policy.name):
            outputs = keras.tree.flatten(forward(model, x, training=False))
        rows = [np.asarray(tf.cast(one, tf.float32)) for one in outputs]
        return np.concatenate([one.reshape(len(one), -1) for one in rows], axis=1)
    except Exception:  # Ids out of range, or a subclass without a `call`.
        return None
