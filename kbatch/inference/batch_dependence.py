"""Do predictions depend on the batch size?

An example should be predicted alike in a batch of any size. Rounding differs, as sums are split
otherwise, and it grows with the depth of a model. So what rounding may change is measured: ten
times what the outputs change when the inputs move by one eps of the policy, and at least 8 eps of
the largest output. What changes more is no rounding: a layer mixes the examples of a batch
(BatchNormalization called with `training=True`, a softmax or a mean over the first axis, padding to
the longest row), or a number overflows that grows with the batch.

A batch repeats the rows of the data, so each of its outputs can be compared with that of the same
row in a batch of the smallest size, one example unless you chose others. A second batch ends
with a row that is 1,000 times larger, which must not change the outputs of the others: dynamic
quantisation in ONNX Runtime takes one scale for a whole batch, and makes zeros of the others.

The precision inside a function is unknown. Its eps is that of float16 and TensorFloat-32.
"""

import functools
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

# Rounding may change so many times what one eps of the inputs changes, and so many eps at least.
_TIMES_MOVED, _LEAST_EPS = 10.0, 8.0
# Rows that are run in batches of the smallest size, and most examples of a batch to compare.
_ROWS, _COMPARED = 6, 64
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_EPS_OF_TF32 = 2.0**-10
_LARGER = 1000.0
# One step of int8, as a share of its range; other quantisations have fewer steps.
_EPS_OF_INT8, _EPS_OF_FEWER_BITS = 2.0**-7, 2.0**-3


# Of each output its rows in the smallest batches, and how much rounding may change them.
_Reference = list[tuple[list[np.ndarray], float]]


class BatchDependence:
    """What the batch size changes in the outputs, by call path, policy and batch size."""

    def __init__(self, models: Mapping[str, Any], rows: Any):
        self.found: dict[Setting, SizeEffect] = {}
        self._models, self._data = models, rows
        self._repeated = len(keras.tree.flatten(rows)[0])
        self._rows = min(_ROWS, self._repeated)
        self._smallest: dict[Any, _Reference] = {}  # By call path and policy.
        # By how much outputs change beside a row that is much larger, None if by rounding only.
        self._beside_larger: dict[Any, float | None] = {}

    def see(self, setting: Setting, outputs: Any, *, examples: int, run: Run) -> None:
        """Take the outputs of a call; the first of a path and policy has its smallest batches."""
        series, size = setting
        if series not in self._smallest:
            self._smallest[series] = self._reference(run, series[1], size)
            return
        effects = self._effects(series, outputs, examples)
        if series not in self._beside_larger:  # At one size, since it costs a call.
            others = self._outputs_beside_larger(run, size)
            beside = self._effects(series, others, size, compared=size - 1)
            worst = max((e.difference or 0.0 for e in beside if e.depends), default=None)
            self._beside_larger[series] = worst
            effects += [effect for effect in beside if effect.depends]
        if effects:
            difference = max(effect.difference or 0.0 for effect in effects)
            changed = [e.changed_argmax for e in effects if e.changed_argmax is not None]
            self.found[setting] = SizeEffect(
                any(effect.depends for effect in effects),
                difference if np.isfinite(difference) else None,
                max(changed, default=None),
            )

    def notes(self) -> tuple[Note, ...]:
        """Return a note on the first size that changes outputs, none where no size does."""
        differing = (one for one, effect in self.found.items() if effect.depends)
        if (setting := next(differing, None)) is None:
            return ()
        difference, larger = self.found[setting].difference, self._beside_larger[setting.series]
        found = "overflow" if difference is None else f"differ by {percent(difference)}"
        found += f" beside a row that is {_LARGER:,.0f} times larger" * (larger == difference)
        return (Note.of("depends_on_size", setting=str(setting), size=setting.size, found=found),)

    def _effects(
        self, series: Any, outputs: Any, examples: int, *, compared: int | None = None
    ) -> list[SizeEffect]:
        """Compare the outputs of a batch, or the first of them, with those of small batches."""
        pairs = zip(self._smallest[series], keras.tree.flatten(outputs), strict=False)
        found = (
            _effect(rows, _examples(leaf, examples)[:compared], tolerance, self._repeated)
            for (rows, tolerance), leaf in pairs
        )
        return [effect for effect in found if effect is not None]

    def _outputs_beside_larger(self, run: Run, size: int) -> Any:
        """Run a batch whose last row is much larger; without floats none can be."""
        if not any(map(_is_float, keras.tree.flatten(self._data))):
            return ()
        batch = keras.tree.map_structure(_with_larger_end, repeated(self._data, size))
        try:
            return run(batch, size)
        except Exception:  # Of a value far out of range, whatever a function raises.
            return ()

    def _reference(self, run: Run, policy: str | None, size: int) -> _Reference:
        """Run rows in batches of one size, as they are and moved by one eps."""
        eps, rng = eps_of(policy), np.random.default_rng(0)
        batch = repeated(self._data, size * -(-self._rows // size))
        expected = _in_batches(run, batch, size, self._rows)
        if any(_is_float(leaf) for leaf in keras.tree.flatten(batch)):
            moved = keras.tree.map_structure(lambda leaf: _moved(leaf, eps, rng), batch)
            others = _in_batches(run, moved, size, self._rows)
        elif policy is None:  # The first floats within a function cannot be reached.
            others = expected
        else:  # Whole numbers and text cannot move: what the first layers make of them does.
            eager = functools.partial(_run_model, self._models[policy])
            with _first_floats_moved(eps, rng):
                others = _in_batches(eager, batch, size, self._rows)
        found = []
        for rows, changed in zip(expected, others, strict=False):
            moves = [_largest(_differences(*pair)) for pair in zip(rows, changed, strict=False)]
            least = _LEAST_EPS * eps * max(map(_largest, rows), default=0.0)
            found.append((rows, max(_TIMES_MOVED * max(moves, default=0.0), least)))
        return found


def eps_of(policy: str | None) -> float:
    """Return the relative rounding of a policy, or of the coarsest of several joined by `+`."""
    if policy is None:
        return _EPS_OF_TF32
    found = []
    for name in policy.split("+"):
        if name.startswith("int8"):
            found.append(_EPS_OF_INT8)
        elif "_from_" in name:
            found.append(_EPS_OF_FEWER_BITS)
        else:
            found.append(_EPS.get(keras.DTypePolicy(name).compute_dtype or "", _EPS["float32"]))
    gpu = bool(tf.config.list_physical_devices("GPU"))
    # Some kernels of a GPU multiply float32 so, and the batch size chooses the kernel.
    if gpu and tf.config.experimental.tensor_float_32_execution_enabled():
        found.append(_EPS_OF_TF32)
    return max(found)


def _in_batches(run: Run, batch: Any, size: int, rows: int) -> list[list[np.ndarray]]:
    """Return of each output its rows."""
    found = []
    for start in range(0, rows, size):
        part = keras.tree.map_structure(lambda leaf, at=start: leaf[at : at + size], batch)
        outputs = keras.tree.flatten(run(part, size))  # Copied: a function may reuse its memory.
        found.append([list(np.array(_examples(leaf, size))) for leaf in outputs])
    return [list(itertools.chain(*parts))[:rows] for parts in zip(*found, strict=False)]


def _examples(output: Any, examples: int) -> np.ndarray:
    """Return an output, empty where it has not a float or more for each example."""
    leaf = np.asarray(output)
    return leaf if _is_float(leaf) and leaf.ndim and len(leaf) == examples else np.empty(0)


def _effect(
    rows: list[np.ndarray], found: np.ndarray, tolerance: float, repeated: int
) -> SizeEffect | None:
    """Compare; the difference may be infinite."""
    places = np.flatnonzero(np.arange(len(found)) % repeated < len(rows))
    if not len(places):
        return None
    largest, scale, sure, changed = 0.0, 0.0, 0, 0
    for place in places[np.linspace(0, len(places) - 1, min(_COMPARED, len(places))).astype(int)]:
        row, other = rows[place % repeated], found[place]
        largest = max(largest, float(np.max(_differences(row, other), initial=0.0)))
        scale = max(scale, _largest(row), _largest(other))
        if row.shape == other.shape and row.ndim and row.shape[-1] > 1:
            second, first = np.moveaxis(np.partition(_wide(row), -2)[..., -2:], -1, 0)
            known = first - second > tolerance
            sure += int(np.sum(known))
            changed += int(np.sum(known & (row.argmax(-1) != other.argmax(-1))))
    return SizeEffect(
        largest > tolerance, largest / (scale or 1.0), changed / sure if sure else None
    )


def _differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Subtract where both have values: a row may be as long as the longest of its batch."""
    both = tuple(slice(min(ends)) for ends in zip(one.shape, other.shape, strict=False))
    one, other = _wide(one)[both], _wide(other)[both]
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(alike, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _largest(values: np.ndarray) -> float:
    wide = np.abs(_wide(values))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))


def _wide(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype("float64")


def _is_float(values: Any) -> bool:
    return getattr(getattr(values, "dtype", None), "name", "") in _EPS


def _with_larger_end(leaf: np.ndarray) -> np.ndarray:
    if not _is_float(leaf):
        return leaf
    wide = _wide(leaf)
    largest = wide[np.argmax(np.max(np.abs(wide.reshape(len(wide), -1)), axis=1, initial=0.0))]
    wide[-1] = _LARGER * largest
    with np.errstate(over="ignore"):
        return wide.astype(leaf.dtype)


def _moved(values: Any, eps: float, rng: np.random.Generator) -> Any:
    """Move some of the values by one eps, away from zero: a whole number in a float stays one."""
    if not _is_float(values):
        return values
    values = np.asarray(values)
    step = max(eps, _EPS[values.dtype.name])
    return (_wide(values) * (1 + step * rng.integers(0, 2, values.shape))).astype(values.dtype)


def _run_model(model: Any, batch: Any, _: int) -> Any:
    return forward(model, keras.tree.map_structure(tf.constant, batch), training=False)


def _first_floats_moved(eps: float, rng: np.random.Generator) -> AbstractContextManager[None]:
    """Let operations that make floats of whole numbers or text return them moved by one eps."""

    def called(_: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        if any(map(_is_float_tensor, keras.tree.flatten((args, kwargs)))):
            return outputs
        return keras.tree.map_structure(
            lambda t: tf.constant(_moved(t.numpy(), eps, rng)) if _is_float_tensor(t) else t,
            outputs,
        )

    return replaced_layer_calls(called, kind=keras.Operation)


def _is_float_tensor(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating and hasattr(value, "numpy")
