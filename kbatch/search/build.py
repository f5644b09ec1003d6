"""The models of a search: built under a seed and a dtype policy, and each of them a new one."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import keras_tuner
import numpy as np

from kbatch.errors import InputError
from kbatch.library_internals import layers_of
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.build_function import build_under
from kbatch.training.model import inner_optimizers


def build_to_train(
    hypermodel: keras_tuner.HyperModel, hp: Any, seed: int | None, policy: str | None
) -> keras.Model:
    """Build a model for a measurement, also in another process."""
    return sum_sparse_gradients(build_under(hypermodel, hp, seed, policy))


@contextlib.contextmanager
def reads_batch_size(hp: keras_tuner.HyperParameters) -> Iterator[list[str]]:
    """List "batch_size" as often as its value is read."""
    found: list[str] = []

    class Values(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if key == "batch_size":
                found.append(key)
            return super().__getitem__(key)

    hp.values = Values(hp.values)
    try:
        yield found
    finally:
        hp.values = dict(hp.values)


# Numbers of a weight by which a change is noticed: training changes almost all of them.
_MOST_COMPARED = 1024


class BuiltParts:
    """Refuses models that share trained parts with an earlier one of the same build function.

    A build function may return layers that it has returned before, as long as they do not change:
    a frozen base, or an adapted `Normalization`.
    """

    def __init__(self):
        # By id, of each layer, weight and optimizer that still lives: whether a model trains it,
        # and the values of a weight, read when a second model has it.
        self._known: dict[int, tuple[weakref.ref[Any], bool, np.ndarray | None]] = {}
        self._seeds: dict[int, tuple[weakref.ref[Any], np.ndarray]] = {}  # As they were first.

    def check(self, model: Any) -> None:
        """Refuse a model that has an optimizer, or weights that train, of an earlier model."""
        weights, optimizers = model.weights, inner_optimizers(model)
        trained = {id(one) for one in (*optimizers, *model.trainable_weights)}
        trained |= {
            id(layer)
            for layer in layers_of(model)
            if any(id(one) in trained for one in layer.weights)
        }
        for part in (*layers_of(model), *optimizers, *weights):
            reference, was_trained, first = self._known.get(id(part), (None, False, None))
            trains = id(part) in trained
            if reference is not None and reference() is part:
                if trains or was_trained:
                    raise _goes_on(model, part)
                if isinstance(part, keras.Variable):
                    flat: Any = keras.ops.reshape(part, [-1])
                    values = np.array(flat[:_MOST_COMPARED])
                    first = values if first is None else first
                    if not np.array_equal(first, values, equal_nan=True):
                        raise _goes_on(model, part)
            else:
                first = None
            self._known[id(part)] = weakref.ref(part), trains, first
        weights = {id(one) for one in weights}
        for seed in (one for one in model.variables if id(one) not in weights):
            reference, state = self._seeds.get(id(seed), (None, None))
            if reference is not None and reference() is seed:
                seed.assign(state)  # Such as of a `Dropout` in a frozen base.
            else:
                self._seeds[id(seed)] = weakref.ref(seed), np.array(seed.value)

    def __reduce__(self):
        return BuiltParts, ()  # Another process builds its own models.


def _goes_on(model: Any, part: Any) -> InputError:
    """Return why a model is refused: a part of it was in an earlier model and trains."""
    if part is model:
        again = f"the same {type(model).__name__} {model.name!r} again"
        return InputError(
            "`build` must make a new model at each call, also for another trial or dtype policy: "
            f"make the model and its optimizer inside the function. Received: {again}."
        )
    if isinstance(part, keras.optimizers.Optimizer):
        again = f"the same optimizer again, {type(part).__name__} {part.name!r}"
        return InputError(
            "`build` must make a new optimizer at each call, or a trial would start with the state "
            f"of the trial before: make it inside the function. Received: {again}."
        )
    names = [
        layer.name
        for layer in model.layers
        if layer is part or any(one is part for one in (*layers_of(layer), *layer.weights))
    ]
    return InputError(
        "`build` must make all layers that training changes at each call, or a trial would start "
        "with the weights of the trial before: make them inside the function, and set or load "
        "their pretrained weights there. You may make a layer that does not change outside: set "
        "`trainable = False` before the function is called for the first time. Received: "
        f"layer {', '.join(map(repr, names[:1]))} again, with weights that training changes."
    )
