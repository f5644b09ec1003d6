"""Find out whether predictions depend on the batch size.

The prediction of an example should be the same in a batch of any size, except for rounding. Sums
are split differently at different sizes, and the rounding error grows with the depth of a model.
So kbatch allows a change of ten times the change of the outputs when the inputs move by one eps of
the policy, and at least 8 eps of the largest output. A larger change has another cause. Either a
layer mixes the examples of a batch (BatchNormalization called with `training=True`, a softmax or a
mean over the first axis, padding to the longest row), or a number that grows with the batch
overflows.

A batch repeats the rows of the data. Each output is compared with the output of the same row in a
batch of the smallest size, which is usually one example. A second batch ends with a row that is
1,000 times larger, which must not change the other outputs. It does in ONNX Runtime with dynamic
quantisation, which uses one scale for the whole batch and rounds the other rows to zero.

The precision inside a function is unknown. kbatch assumes the eps of float16 and TensorFloat-32.
"""

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.inference.call_paths import Run, repeated
from kbatch.inference.result import SizeEffect
from kbatch.library_internals import forward, replaced_layer_calls
from kbatch.page.numbers import percent
from kbatch.records.notes import Note
from kbatch.timing import Setting
from kbatch.training.data.forms import rows_of

# Rounding may change an output by this multiple of its change for one eps of the inputs, and by at
# least this many eps of the largest output.
_MOVED_FACTOR, _LEAST_EPS = 10.0, 8.0
# Rows that run in batches of the smallest size, and examples of a larger batch to compare.
_ROWS, _COMPARED = 6, 64
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_EPS_OF_TF32 = 2.0**-10
_LARGER = 1000.0
# One step of int8, as a share of its range. Other quantisations have fewer steps.
_EPS_OF_INT8, _EPS_OF_FEWER_BITS = 2.0**-7, 2.0**-3

# For each output: its rows in the smallest batches, and by how much rounding may change them.
_Reference = list[tuple[list[np.ndarray], float]]


class BatchDependence:
    """Finds out how outputs change with the batch size, by call path, policy and size."""

    def __init__(self, models: Mapping[str, Any], rows: Any):
        self.effects: dict[Setting, SizeEffect] = {}
        self._models, self._data = models, rows
        self._period = rows_of(rows)
        self._rows = min(_ROWS, self._period)
        self._references: dict[Any, _Reference] = {}  # By call path and policy.
        # By call path and policy: largest change of an output if another row of the batch is much
        # larger. None if it is only rounding.
        self._beside_larger: dict[Any, float | None] = {}

    def see(self, setting: Setting, outputs: Any, *, examples: int, run: Run) -> None:
        """Compare outputs with those of the smallest size, which a series must call first."""
        series, size = setting
        if series not in self._references:
            self._references[series] = self._reference(run, series[1], size)
            return
        effects = self._effects(series, outputs, examples)
        if series not in self._beside_larger:  # At one size only, because it costs a call.
            outputs = self._outputs_beside_larger(run, size)
            beside = self._effects(series, outputs, size, compared=size - 1)
            worst = max((e.difference or 0.0 for e in beside if e.depends), default=None)
            self._beside_larger[series] = worst
            effects += [effect for effect in beside if effect.depends]
        if effects:
            difference = max(effect.difference or 0.0 for effect in effects)
            changed = [e.changed_argmax for e in effects if e.changed_argmax is not None]
            self.effects[setting] = SizeEffect(
                any(effect.depends for effect in effects),
                difference if np.isfinite(difference) else None,
                max(changed, default=None),
            )

    def notes(self) -> tuple[Note, ...]:
        """Return a note about the first size that changes outputs, if any size does."""
        settings = (setting for setting, effect in self.effects.items() if effect.depends)
        if (setting := next(settings, None)) is None:
            return ()
        difference, larger = self.effects[setting].difference, self._beside_larger[setting.series]
        words = "overflow" if difference is None else f"differ by {percent(difference)}"
        words += f" next to a row that is {_LARGER:,.0f} times larger" * (larger == difference)
        return (Note.of("depends_on_size", setting=str(setting), size=setting.size, found=words),)

    def _effects(
        self, series: Any, outputs: Any, examples: int, *, compared: int | None = None
    ) -> list[SizeEffect]:
        """Compare outputs of a batch with the reference. `compared` limits it to the first rows."""
        pairs = zip(self._references[series], keras.tree.flatten(outputs), strict=False)
        effects = (
            _effect(rows, _examples(leaf, examples)[:compared], tolerance, self._period)
            for (rows, tolerance), leaf in pairs
        )
        return [effect for effect in effects if effect is not None]

    def _outputs_beside_larger(self, run: Run, size: int) -> Any:
        """Run a batch whose last row is much larger, if the inputs have floats."""
        if not any(map(_is_float, keras.tree.flatten(self._data))):
            return ()
        batch = keras.tree.map_structure(_with_larger_end, repeated(self._data, size))
        try:
            return run(batch, size)
        except Exception:  # A function may raise anything if a value is far out of range.
            return ()

    def _reference(self, run: Run, policy: str | None, size: int) -> _Reference:
        """Run rows in batches of one size, unchanged and moved by one eps."""
        eps, rng = eps_of(policy), np.random.default_rng(0)
        batch = repeated(self._data, size * -(-self._rows // size))
        expected = _in_batches(run, batch, size, self._rows)
        if any(_is_float(leaf) for leaf in keras.tree.flatten(batch)):
            moved = keras.tree.map_structure(lambda leaf: _moved(leaf, eps, rng), batch)
            others = _in_batches(run, moved, size, self._rows)
        elif policy is None:  # kbatch cannot see inside a function.
            others = expected
        else:  # Integers and text cannot move by one eps, so the first floats of the model do.
            model = self._models[policy]

            def eager(batch: Any, _: int) -> Any:
                return forward(model, keras.tree.map_structure(tf.constant, batch), training=False)

            with _first_floats_moved(eps, rng):
                others = _in_batches(eager, batch, size, self._rows)
        reference = []
        for rows, changed in zip(expected, others, strict=False):
            moves = [_largest(_differences(*pair)) for pair in zip(rows, changed, strict=False)]
            least = _LEAST_EPS * eps * max(map(_largest, rows), default=0.0)
            reference.append((rows, max(_MOVED_FACTOR * max(moves, default=0.0), least)))
        return reference


def eps_of(policy: str | None) -> float:
    """Return the relative rounding of a policy, or of the coarsest of several joined by `+`."""
    if policy is None:
        return _EPS_OF_TF32
    eps = []
    for name in policy.split("+"):
        if name.startswith("int8"):
            eps.append(_EPS_OF_INT8)
        elif "_from_" in name:
            eps.append(_EPS_OF_FEWER_BITS)
        else:
            eps.append(_EPS.get(keras.DTypePolicy(name).compute_dtype or "", _EPS["float32"]))
    gpu = bool(tf.config.list_physical_devices("GPU"))
    # Some kernels of a GPU multiply float32 in TensorFloat-32, and the batch size selects a kernel.
    if gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        eps.append(_EPS_OF_TF32)
    return max(eps)


def _in_batches(run: Run, batch: Any, size: int, rows: int) -> list[list[np.ndarray]]:
    """Run the first rows in batches of a size. Return for each output a list of its rows."""
    parts = []
    for start in range(0, rows, size):
        part = keras.tree.map_structure(lambda leaf, at=start: leaf[at : at + size], batch)
        outputs = keras.tree.flatten(run(part, size))  # Copied: a function may reuse its memory.
        parts.append([list(np.array(_examples(leaf, size))) for leaf in outputs])
    return [list(itertools.chain(*leaves))[:rows] for leaves in zip(*parts, strict=False)]


def _examples(output: Any, examples: int) -> np.ndarray:
    """Return an output, or an empty array if it does not have floats for each example."""
    leaf = np.asarray(output)
    return leaf if _is_float(leaf) and leaf.ndim and len(leaf) == examples else np.empty(0)


def _effect(
    rows: list[np.ndarray], outputs: np.ndarray, tolerance: float, period: int
) -> SizeEffect | None:
    """Compare outputs, which repeat with a period, with the rows of the reference."""
    indices = np.flatnonzero(np.arange(len(outputs)) % period < len(rows))
    if not len(indices):
        return None
    largest, scale, clear, changed = 0.0, 0.0, 0, 0
    compared = np.linspace(0, len(indices) - 1, min(_COMPARED, len(indices))).astype(int)
    for index in indices[compared]:
        row, output = rows[index % period], outputs[index]
        largest = max(largest, float(np.max(_differences(row, output), initial=0.0)))
        scale = max(scale, _largest(row), _largest(output))
        if row.shape == output.shape and row.ndim and row.shape[-1] > 1:
            second, first = np.moveaxis(np.partition(_float64(row), -2)[..., -2:], -1, 0)
            is_clear = first - second > tolerance
            clear += int(np.sum(is_clear))
            changed += int(np.sum(is_clear & (row.argmax(-1) != output.argmax(-1))))
    share = changed / clear if clear else None
    return SizeEffect(largest > tolerance, largest / (scale or 1.0), share)


def _differences(row: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Return differences; infinite if one value is not finite. Padding of one array is left out."""
    both = tuple(slice(min(ends)) for ends in zip(row.shape, output.shape, strict=False))
    row, output = _float64(row)[both], _float64(output)[both]
    with np.errstate(invalid="ignore"):
        difference = np.abs(row - output)
    equal = (row == output) | (np.isnan(row) & np.isnan(output))
    return np.where(equal, 0.0, np.where(np.isnan(difference), np.inf, difference))


def _largest(values: np.ndarray) -> float:
    magnitudes = np.abs(_float64(values))
    return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def _float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype("float64")


def _is_float(values: Any) -> bool:
    return getattr(getattr(values, "dtype", None), "name", "") in _EPS


def _with_larger_end(leaf: np.ndarray) -> np.ndarray:
    if not _is_float(leaf):
        return leaf
    rows = _float64(leaf)
    largest = rows[np.argmax(np.max(np.abs(rows.reshape(len(rows), -1)), axis=1, initial=0.0))]
    rows[-1] = _LARGER * largest
    with np.errstate(over="ignore"):
        return rows.astype(leaf.dtype)


def _moved(values: Any, eps: float, rng: np.random.Generator) -> Any:
    """Move half of the values by one eps away from zero, so that `int(value)` stays the same."""
    if not _is_float(values):
        return values
    values = np.asarray(values)
    step = max(eps, _EPS[values.dtype.name])
    return (_float64(values) * (1 + step * rng.integers(0, 2, values.shape))).astype(values.dtype)


def _first_floats_moved(eps: float, rng: np.random.Generator) -> AbstractContextManager[None]:
    """Within the block, move the floats that operations make from integers or text by one eps."""

    def called(_: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        if any(map(_is_float_tensor, keras.tree.flatten((args, kwargs)))):
            return outputs
        return keras.tree.map_structure(
            lambda t: tf.constant(_moved(t.numpy(), eps, rng)) if _is_float_tensor(t) else t,
            outputs,
        )

    return replaced_layer_calls(called, kind=keras.Operation)


def _is_float_tensor(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating and hasattr(value, "numpy")
