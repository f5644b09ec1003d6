"""Time some updates before a search, and check whether the model can train in mixed_float16.

The updates use rows of the data, and run without `fit`, whose overhead is longer than some small
steps. They change no values of the model. They trace its graph, which training then uses. This
module also explains why training runs diverge or lose updates.
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
from kbatch.training.data.batches import of_any_length
from kbatch.training.data.forms import as_dataset, first_of_each, is_dataset
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import (
    check_loss_is_scaled,
    dtype_policy_scope,
    overflows,
    skips_all_updates,
)
from kbatch.training.model import installed_step, is_compiled, loss_scaled, replica_count, user_step
from kbatch.training.state import assign, copies_of, kept_state
from kbatch.training.step_call import StepCall, endless
from kbatch.training.steps_per_execution import set_steps

# Examples of the first updates, and of the updates that are timed. The first number is small,
# because more examples can take minutes in float16 on a CPU. XLA never compiles such small batches.
FIRST_ROWS, TIMED_ROWS = 2, 32
_MOST_TRIES = 20  # Of a first update. Each try that overflows halves the loss scale.
# Short updates are timed together, in one execution: at most this many, in at most these seconds.
_MOST_JOINED, _JOINED_S = 8, 0.05
# Longer updates are timed again this often, because other work may have disturbed the first one,
# unless they take more than these seconds.
_REPETITIONS, _SURELY_LONG_S = 3, 0.5
TOO_SLOW = 2.0  # If float16 takes this many times as long as float32, kbatch trains in float32.
# Seconds. If a float16 update of `FIRST_ROWS` is too slow and takes more than the first number, no
# larger one is timed. A larger one has so few rows that it takes at most the second number.
_SLOW_FIRST_S, _LONGEST_S = 0.03, 0.2
# Timing ends when one dtype has won this many more rounds than the other, or after the most rounds.
_ROUNDS_AHEAD, _MOST_ROUNDS = 2, 5

# Keras's loss scale starts at 2^15 and reaches 1 after this many overflows.
_START_OVERFLOWS = 15
# A usual share of later overflows is smaller, because Keras doubles the scale every 2,000 updates.
_RARE_SHARE = 1 / 200
# The batch size in the search for values that are not finite, and its longest time in seconds.
_SEARCHED_ROWS, _SEARCHED_S = 256, 2.0
# The most updates in this search. If a weight is larger, the training has diverged by itself.
_MOST_UPDATES, _LARGEST_WEIGHT = 200, 1e4
# Float16 rounds integers above the first number. Numbers above the second one become infinite.
EXACT_UP_TO, _LARGEST = 2048, 65_504
# If rounded inputs change outputs by more than this share of their spread, the digits matter.
_CHANGED_SHARE = 0.05


class CutBatches:
    """A data function for any number of rows, from one that may accept only some batch sizes.

    It takes the first rows of a batch of a size that the given function accepts.
    """

    def __init__(self, function: Callable[[int], Any], batch_sizes: Sequence[int], first: int):
        self._function = function
        self._sizes = sorted(batch_sizes, key=lambda size: (size != first, size < first, size))

    def __call__(self, rows: int) -> Any:
        errors: list[Exception] = []
        for size in sorted(self._sizes, key=lambda size: size < rows):
            try:
                batches = as_dataset(self._function(size))
                if is_dataset(batches):
                    next(iter(batches.take(1)), None)
            except Exception as error:  # The trial of this size will record it.
                errors.append(error)
            else:
                return first_of_each(batches, rows) if size > rows else batches
        raise errors[0]


class Updates:
    """Makes and times updates of a model on rows of its data, and restores the model's state."""

    def __init__(
        self,
        model: Any,  # Its train function is traced here, and training uses it later.
        data: TrainingData,
        *,
        counted: bool = False,  # Whether the number of steps per execution is chosen later.
        compiled: bool = True,  # If False, XLA does not compile the steps, even if it could.
        only_rows: int | None = None,  # The only number of rows that the model accepts, if any.
    ):
        self._only_rows, self._compiled = only_rows, compiled
        self.model, self._replicas = model, replica_count(model)
        policy = model.dtype_policy.name
        self.run = Workload(lambda: model, data, policy, replicas=self._replicas).start()
        self.seconds: dict[int, float] = {}  # Seconds of a step, by rows.
        self.first_s: dict[int, float] = {}  # Seconds of the first step, which XLA may compile.
        self._peak_bytes: dict[int, int] = {}  # Peak memory of an update, by rows.
        # Overflows before the first update, by rows. If every batch overflowed, None.
        self._overflows: dict[int, int | None] = {}
        self._batches: dict[int, Any] = {}  # Endless iterators of one batch, by rows.
        if counted:
            set_steps(model, int(model.steps_per_execution))
        model.make_train_function()

    def step_s(self, rows: int) -> float:
        """Time an update on a number of rows, after a first one that may trace the graph."""
        rows = self._only_rows or rows
        try:
            return self._step_s(rows)
        except MEMORY_ERRORS as error:
            # If XLA on a CPU runs out of memory, it frees the weights, so the model is lost.
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
                full_rows.assign(rows if self._compiled and rows != FIRST_ROWS else 0)
            if rows not in self._overflows:
                began_s = time.perf_counter()
                self._begin(rows, step)
                self.first_s[rows] = time.perf_counter() - began_s
            batches = self._batches[rows]
            self.run.memory.reset()
            step_s = _execution_s(step, batches)
            for _ in range(_REPETITIONS):
                if _JOINED_S / 2 < step_s < _SURELY_LONG_S:
                    step_s = min(step_s, _execution_s(step, batches))
            joined_steps = min(_MOST_JOINED, int(_JOINED_S / step_s))
            if joined_steps > 1:
                step_s = min(step_s, _execution_s(step, batches, joined_steps) / joined_steps)
            peak = max(self.run.memory.peak_bytes, self.run.variables_bytes(), 1)
            self._peak_bytes[rows] = max(peak, self._peak_bytes.get(rows, 0))
        self.seconds[rows] = min(step_s, self.seconds.get(rows, step_s))
        return step_s

    def peak_bytes(self, rows: int) -> int | None:
        """Return the peak memory of updates on a number of rows, or None if memory ran out."""
        rows = self._only_rows or rows
        try:
            if rows not in self._peak_bytes:
                self.step_s(rows)
        except DataEnded:  # A data function gives fewer rows.
            return None
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self._peak_bytes)):
                raise
            return None
        return self._peak_bytes[rows]

    def check(self, rows: int, largest_batch_size: int) -> None:
        """Raise PolicyUnsupported if an epoch makes no update, because its batches overflow."""
        rows = self._only_rows or rows
        if rows not in self._overflows:
            self.step_s(rows)
        examples, overflowed = self.run.examples, self._overflows[rows]
        if overflowed is None:
            raise PolicyUnsupported("the gradients of every batch overflowed in float16")
        if examples is not None and overflowed * largest_batch_size >= examples:
            raise PolicyUnsupported(f"the first {overflowed} batches overflowed in float16")

    def _begin(self, rows: int, step: StepCall) -> None:
        """Make the first update on a number of rows, and repeat it while it overflows."""
        batch = self.run.data.sample(rows * self._replicas, self.model, fewest=1)
        with tf.device("CPU:0"):  # The batch may be on another device.
            batches = endless(keras.tree.lists_to_tuples(batch))
        # Trace the graph for any number of rows, so that training can use it.
        spec = batches.element_spec
        spec = spec if self._only_rows else tf.nest.map_structure(of_any_length, spec)
        batches = tf.data.experimental.from_variant(tf.data.experimental.to_variant(batches), spec)
        if self._replicas > 1:
            batches = self.model.distribute_strategy.experimental_distribute_dataset(batches)
        self._batches[rows] = iter(batches)
        tries = 0
        while not tries or (tries < _MOST_TRIES and skips_all_updates(self.model)):
            step.execute(self._batches[rows], 1)
            tries += 1
        check_loss_is_scaled(self.model)
        failed = skips_all_updates(self.model)
        self._overflows[rows] = None if failed else overflows(self.model)


def _execution_s(step: StepCall, batches: Any, steps: int = 1) -> float:
    """Return the seconds of some steps, which run as one execution if the model allows it."""
    began_s = time.perf_counter()
    step.execute(batches, steps)
    return max(SHORTEST_S, time.perf_counter() - began_s)


def check_float16(
    half: Updates, full: Callable[[], Updates], batch_sizes: Sequence[int], *, timed: bool
) -> float | None:
    """Raise PolicyUnsupported if a search cannot train under mixed_float16.

    `half` makes updates under mixed_float16. `full()` returns the updates in float32. If `timed`,
    return the time of an update in float16, divided by its time in float32.
    """
    largest, ratio = batch_sizes[-1], None
    rows = half.run.data.largest_rows(EXACT_UP_TO, half.model)
    if rows is not None:
        check_large_inputs(half.model, full().model, rows)
    half.check(FIRST_ROWS, largest)
    if timed:
        ratio = slowdown(half.step_s, full().step_s, batch_sizes[len(batch_sizes) // 2])
        if ratio > TOO_SLOW:
            return ratio
    # A loss that sums over examples may overflow only with more of them.
    if half.peak_bytes(min(TIMED_ROWS, largest)) is not None:
        half.check(min(TIMED_ROWS, largest), largest)
    return ratio


def slowdown(
    half_s: Callable[[int], float], full_s: Callable[[int], float], batch_size: int
) -> float:
    """Return the time of an update under mixed_float16, divided by its time in float32.

    `half_s` and `full_s` return the seconds of an update on a number of rows under the two
    policies, and are called in turns. If memory runs out, the number of rows is halved.
    """
    try:
        few_s = half_s(FIRST_ROWS)
        if few_s > max(_SLOW_FIRST_S, TOO_SLOW * (few_full_s := full_s(FIRST_ROWS))):
            return few_s / few_full_s
        most = TIMED_ROWS * _LONGEST_S / half_s(min(batch_size, TIMED_ROWS))
        rows = min(batch_size, max(TIMED_ROWS, int(most)))
        ratios: list[float] = []
        ahead = 0  # Rounds in which float16 is too slow, minus the others.
        while abs(ahead) < _ROUNDS_AHEAD and len(ratios) < _MOST_ROUNDS:
            ratios.append(half_s(rows) / full_s(rows))
            ahead += 1 if ratios[-1] > TOO_SLOW else -1
        return statistics.median(ratios)
    except MEMORY_ERRORS as error:
        if batch_size <= FIRST_ROWS or not ran_out_of_memory(error, smaller_worked=True):
            raise
    return slowdown(half_s, full_s, max(FIRST_ROWS, batch_size // 2))


def lost_updates(model: Any, epochs: Sequence[EpochRecord]) -> int:
    """Count the updates that overflowed. If there are no more than usual, return 0.

    Some overflows are usual: the loss scale starts high, and Keras doubles it now and then.
    """
    batches = [epoch.batches or 0 for epoch in epochs]
    lost = [max(0, n - epoch.updates) for n, epoch in zip(batches, epochs, strict=True)]
    # The start ends after the first epoch in which at least half of the batches made an update.
    start = next((k + 1 for k, n in enumerate(batches) if 2 * lost[k] <= n), len(lost))
    # Judge only the second half: while the gradients grow, overflows lower the scale step by step.
    half = max(start, len(lost) // 2)
    later, in_each_epoch = sum(lost[half:]), len(lost) > 2 and min(lost) > 0
    often = later > _RARE_SHARE * sum(batches[half:]) and (in_each_epoch or later > 3)
    updates = sum(batches) - sum(lost)
    # In a run of one epoch, the counter of the loss scale shows when the last overflow was.
    since_last = updates
    if model.optimizer.built:  # `int` fails for the variables of a `MirroredStrategy`.
        since_last = np.asarray(keras.ops.convert_to_numpy(model.optimizer.step_counter)).item()
    is_late = 2 * since_last < updates > 20
    late = len(lost) == 1 and lost[0] > 3 and lost[0] > _RARE_SHARE * updates and is_late
    return sum(lost) if often or late or sum(lost[:start]) > _START_OVERFLOWS else 0


def overflow_text(model: Any, epochs: Sequence[EpochRecord]) -> str | None:
    """Describe how float16 harmed a training run with a loss scale, or return None."""
    if not loss_scaled(model) or user_step(model) is not None:
        return None
    if lost := lost_updates(model, epochs):
        return f"{lost:,} of {sum(epoch.batches or 0 for epoch in epochs):,} updates were lost"
    floats = [weight for weight in model.weights if "float" in weight.dtype]
    bad = [w for w in floats if not bool(tf.reduce_all(tf.math.is_finite(w.value)))]
    return f"the weight {bad[0].path!r} became NaN or infinite" if bad else None


def why_not_finite(model: Any, data: TrainingData) -> Note | None:
    """Find the data, layer or loss whose values are not finite, at first or after some updates."""
    batches = data.batches(_SEARCHED_ROWS, model, seed=None, validation_batch_size=_SEARCHED_ROWS)
    counts: dict[str, list[int]] = {}
    part, until_s = None, time.monotonic() + _SEARCHED_S
    for prefix, dataset in (("", batches.dataset), ("validation ", batches.validation_data)):
        for element in dataset if is_dataset(dataset) else ():
            bad = 0
            for name, leaf in _named_parts(element):
                count, rows = counts.setdefault(prefix + name, [0, 0]), len(leaf)
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
        part, updates = _part_after_updates(model, batches.dataset)
    if part is None:
        return None
    when = f"after {pluralize(updates, 'update')}" if updates else "before the first update"
    return Note.of("part_not_finite", part=part, policy=model.dtype_policy.name, when=when)


def _part_after_updates(model: Any, dataset: Any) -> tuple[str | None, int]:
    """Train until the loss is not finite. Return the cause, and the number of updates."""
    until_s = time.monotonic() + _SEARCHED_S
    if user_step(model) is not None or not model.built:
        return None, 0
    with dtype_policy_scope(model.dtype_policy.name):
        for updates, batch in enumerate(dataset.repeat().take(_MOST_UPDATES)):
            values = copies_of(model.weights)
            model.reset_metrics()
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            logs: Any = model.train_on_batch(x, y, weight, return_dict=True)
            if not np.isfinite(logs["loss"]):
                small = all(np.abs(value).max(initial=0) < _LARGEST_WEIGHT for value in values)
                assign(model.weights, values)
                return (first_not_finite(model, batch) if small else None), updates
            if time.monotonic() > until_s:
                break
    return None, 0


def _named_parts(element: Any) -> Iterator[tuple[str, Any]]:
    """Yield the float tensors of a batch, each with the name of its argument."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element)
    parts = [("`x`", x), ("`y`", y), ("`sample_weight`", weight)]
    while parts:
        name, part = parts.pop(0)
        if isinstance(part, Mapping):
            parts += [(f"{name}[{key!r}]", inner) for key, inner in part.items()]
        elif isinstance(part, (list, tuple)):
            parts += [(f"{name}[{place}]", inner) for place, inner in enumerate(part)]
        elif isinstance(part, tf.Tensor) and part.dtype.is_floating and part.shape.rank:
            yield name, part


def first_not_finite(model: Any, batch: Any) -> str | None:
    """Return the first layer or loss that turns finite values of a batch infinite or NaN."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    names: list[str] = []

    def check(layer: Any, call: Any, *arguments: Any, **keywords: Any) -> Any:
        outputs = call(*arguments, **keywords)
        if not names and not _all_finite(outputs):
            names.append(f"layer {layer.name!r}")
        return outputs

    try:
        with dtype_policy_scope(model.dtype_policy.name), replaced_layer_calls(check):
            outputs = forward(model, x, training=False)
            if not names and y is not None:
                loss = compute_loss(model, x, y, outputs, weight)
                if not bool(tf.reduce_all(tf.math.is_finite(loss))):
                    name = getattr(model.loss, "name", getattr(model.loss, "__name__", None))
                    names.append(f"the loss {name or model.loss!r}")
    except Exception:  # A custom model may train without a `call` or a loss.
        return None
    return next(iter(names), None)


def _all_finite(outputs: Any) -> bool:
    tensors = [leaf for leaf in keras.tree.flatten(outputs) if isinstance(leaf, tf.Tensor)]
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    # A mask of -inf is not an overflow.
    return not any(bool(tf.reduce_any(tf.math.is_nan(x) | (x == np.inf))) for x in floats)


def check_large_inputs(half: Any, full: Any, batch: Any) -> None:
    """Raise `PolicyUnsupported` if inputs above 2,048 overflow, or if rounding them matters."""
    part = first_not_finite(half, batch)
    if part is not None and first_not_finite(full, batch) is None:
        raise PolicyUnsupported(f"{part} overflows in float16, whose largest number is 65,504")
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    rounded = keras.tree.map_structure(_rounded, x)
    exact, changed = _outputs_of(full, x), _outputs_of(full, rounded)
    if exact is None or not np.isfinite(exact).all():
        return
    differs = changed is None  # A rounded id may be beyond the last row of an `Embedding`.
    if changed is not None:
        spread = np.abs(exact - exact.mean(0)).mean()
        differs = np.abs(exact - changed).mean() > _CHANGED_SHARE * spread
    halved, others = _outputs_of(half, x), _outputs_of(half, rounded)
    rounds = halved is None or (others is not None and np.array_equal(halved, others))
    if differs and rounds:
        raise PolicyUnsupported(
            "float16 rounds inputs above 2,048, and the outputs depend on the lost digits. If "
            'these numbers are ids, give integers: `x.astype("int32")`'
        )


def _rounded(leaf: Any) -> Any:
    if not (isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating):
        return leaf
    return tf.cast(tf.cast(tf.clip_by_value(leaf, -_LARGEST, _LARGEST), tf.float16), leaf.dtype)


def _outputs_of(model: Any, x: Any) -> np.ndarray | None:
    """Return the outputs, with a row for each example, or None if the model cannot be called."""
    try:
        with dtype_policy_scope(model.dtype_policy.name):
            outputs = keras.tree.flatten(forward(model, x, training=False))
        arrays = [np.asarray(tf.cast(output, tf.float32)) for output in outputs]
        return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
    except Exception:  # Such as an id out of range, or a subclass without a `call`.
        return None
