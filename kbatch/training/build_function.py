"""What a person gave to be tuned: a build function or a HyperModel."""

import contextlib
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import keras_tuner
import numpy as np

from kbatch.errors import InputError, InputTypeError
from kbatch.library_internals import layers_of
from kbatch.training.accumulation import Accumulation
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.model import accumulation_of
from kbatch.training.state import inner_optimizers

BuildFunction = Callable[..., keras.Model]


def as_hypermodel(given: "keras_tuner.HyperModel | BuildFunction") -> keras_tuner.HyperModel:
    """Return a HyperModel for a HyperModel, or for a build function with or without `hp`."""
    if isinstance(given, keras_tuner.HyperModel):
        return given
    if isinstance(given, type) and issubclass(given, keras_tuner.HyperModel):
        raise InputTypeError(
            f"`build` must be an instance, not a class: give `{given.__name__}()`. "
            f"Received: build={given!r}."
        )
    if isinstance(given, keras.Model):
        raise InputTypeError(
            "`build` must build a new model for each trial: give a function that returns "
            f"one, not the model itself. Received: build={given.name!r}, a keras.Model."
        )
    if not callable(given):
        raise InputTypeError(
            "`build` must be a function `hp -> compiled keras.Model` or a "
            f"`keras_tuner.HyperModel`. Received: build={given!r}."
        )
    return _FunctionHyperModel(given)


def has_stock_fit(hypermodel: keras_tuner.HyperModel) -> bool:
    """Return whether keras-tuner's own `fit` trains; another may compute the objective itself."""
    return type(hypermodel).fit is keras_tuner.HyperModel.fit


def model_builder(
    build: "keras_tuner.HyperModel | BuildFunction | keras.Model",
) -> Callable[[], keras.Model]:
    if isinstance(build, keras.Model):
        return _GivenModel(build)
    if not callable(build) and not isinstance(build, keras_tuner.HyperModel):
        raise InputTypeError(
            "The model must be a compiled `keras.Model`, a function that builds one or a "
            f"`keras_tuner.HyperModel`. Received: {build!r}, a {type(build).__name__}."
        )
    hypermodel = as_hypermodel(build)
    return lambda: hypermodel.build(keras_tuner.HyperParameters())


class _GivenModel:
    """A compiled model as it is; its copy in another process trains as it does."""

    def __init__(self, model: keras.Model):
        self._model = model

    def __call__(self) -> keras.Model:
        return self._model

    def __reduce__(self):
        # Keras writes the code of a lambda without the names it uses: better not sent at all.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*includes a `lambda`")
            saved = pickle.dumps(self._model)
        policy = self._model.dtype_policy.name
        return _reread_model, (saved, accumulation_of(self._model), policy)


def _reread_model(
    pickled: bytes, accumulation: Accumulation | None, dtype_policy: str
) -> _GivenModel:
    # A Sequential model does not save its own policy, which decides on the loss scale.
    with dtype_policy_scope(dtype_policy):
        model = pickle.loads(pickled)
    return _GivenModel(model if accumulation is None else accumulation.apply(model))


class _FunctionHyperModel(keras_tuner.HyperModel):
    def __init__(self, function: BuildFunction):
        super().__init__(name=getattr(function, "__name__", None))
        self._function, self._takes_hp = function, True
        with contextlib.suppress(ValueError):  # A builtin without a signature.
            self._takes_hp = any(
                one.name == "hp"
                or one.kind is one.VAR_POSITIONAL
                or (one.default is one.empty and one.kind is not one.VAR_KEYWORD)
                for one in inspect.signature(function).parameters.values()
            )

    def build(self, hp: keras_tuner.HyperParameters) -> Any:
        return self._function(hp) if self._takes_hp else self._function()


# Numbers of a weight by which a change is noticed: training changes almost all of them.
_MOST_COMPARED = 1024


class BuiltParts:
    """Refuses models that go on with what an earlier one of the same build function has trained.

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
            f"make the model and its optimizer inside of the function. Received: {again}."
        )
    if isinstance(part, keras.optimizers.Optimizer):
        again = f"the same optimizer again, {type(part).__name__} {part.name!r}"
        return InputError(
            "`build` must make a new optimizer at each call, or a trial would start with the state "
            f"of the one before: make it inside of the function. Received: {again}."
        )
    names = [
        layer.name
        for layer in model.layers
        if layer is part or any(one is part for one in (*layers_of(layer), *layer.weights))
    ]
    return InputError(
        "`build` must make all layers that training changes at each call, or a trial would start "
        "with the weights of the one before: make them inside of the function, and set or load "
        "their pretrained weights there. A layer that does not change may be made outside: set "
        "`trainable = False` before the function is called for the first time. Received: "
        f"layer {', '.join(map(repr, names[:1]))} again, with weights that training changes."
    )
