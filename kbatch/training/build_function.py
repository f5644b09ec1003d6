"""Build models from a build function, a `keras_tuner.HyperModel` or a compiled model."""

import contextlib
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import keras_tuner

from kbatch.errors import InputTypeError
from kbatch.library_internals import auto_jit_models, metrics_in_float32
from kbatch.training.accumulation import Accumulation
from kbatch.training.dtype_policy import check_own_dtypes, dtype_policy_scope
from kbatch.training.model import accumulation_of, loss_scaled
from kbatch.training.state import seeded

BuildFunction = Callable[..., keras.Model]


def as_hypermodel(build: "keras_tuner.HyperModel | BuildFunction") -> keras_tuner.HyperModel:
    """Make a HyperModel of a build function, with or without `hp`. A HyperModel stays as it is."""
    if isinstance(build, keras_tuner.HyperModel):
        return build
    if isinstance(build, type) and issubclass(build, keras_tuner.HyperModel):
        raise InputTypeError(
            f"`build` must be an instance, not a class: give `{build.__name__}()`. "
            f"Received: build={build!r}."
        )
    if isinstance(build, keras.Model):
        raise InputTypeError(
            "`build` must be a function that returns a new model for each trial, not a model. "
            f"Received: build={build.name!r}, a keras.Model."
        )
    if not callable(build):
        raise InputTypeError(
            "`build` must be a function `hp -> compiled keras.Model` or a "
            f"`keras_tuner.HyperModel`. Received: build={build!r}."
        )
    return _FunctionHyperModel(build)


def has_stock_fit(hypermodel: keras_tuner.HyperModel) -> bool:
    """Return whether a HyperModel uses keras-tuner's `fit`, and not its own."""
    return type(hypermodel).fit is keras_tuner.HyperModel.fit


def model_builder(
    build: "keras_tuner.HyperModel | BuildFunction | keras.Model",
) -> Callable[[], keras.Model]:
    if isinstance(build, keras.Model):
        return _GivenModel(build)
    if not callable(build) and not isinstance(build, keras_tuner.HyperModel):
        raise InputTypeError(
            "The model must be a compiled `keras.Model`, a function that builds one, or a "
            f"`keras_tuner.HyperModel`. Received: {build!r}, a {type(build).__name__}."
        )
    hypermodel = as_hypermodel(build)
    return lambda: hypermodel.build(keras_tuner.HyperParameters())


def build_under(
    hypermodel: keras_tuner.HyperModel, hp: Any, seed: int | None, policy: str | None
) -> Any:
    """Build a model with a seed and a dtype policy. If one is None, Keras's own is used.

    Raises:
        PolicyUnsupported: If the model cannot be built under the policy.
    """
    scope = contextlib.nullcontext() if policy is None else dtype_policy_scope(policy)
    with scope, seeded(seed), auto_jit_models() as auto_models:
        model: Any = hypermodel.build(hp)
    if isinstance(model, keras.Model):
        model.chooses_xla = any(model is auto for auto in auto_models)
        if not hasattr(model, "optimizer"):
            model.optimizer = None  # The model is not compiled.
    if policy is not None:
        check_own_dtypes(model, policy)
        metrics_in_float32(model)
        settings_to_inner(model)
    return model


def model_of(
    build: "keras_tuner.HyperModel | BuildFunction | keras.Model",
    hyperparameters: Mapping[str, Any],
    policy: str,
) -> keras.Model:
    """Build a model with these hyperparameters and dtype policy. A model stays as it is."""
    if isinstance(build, keras.Model):
        settings_to_inner(build)
        return build
    hp = keras_tuner.HyperParameters()
    hp.values = dict(hyperparameters)
    hypermodel = as_hypermodel(build)
    # A `BatchSizeHyperModel` would choose the policy and scale the settings itself.
    return build_under(getattr(hypermodel, "wrapped", hypermodel), hp, None, policy)


@functools.cache
def _plain_loss_scale() -> dict[str, Any]:
    """Return the default attributes of a loss scale, without its variables."""
    attributes = vars(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    simple = (bool, int, float, str)
    return {name: v if isinstance(v, simple) else None for name, v in attributes.items()}


def settings_to_inner(model: Any) -> None:
    """Move settings that the user set after `compile` from a loss scale to its inner optimizer.

    Under mixed_float16, `compile` wraps the optimizer in a loss scale. Keras's loss scale has all
    settings of an optimizer, such as `clipnorm` or `exclude_from_weight_decay`, and ignores them.
    """
    if not isinstance(model, keras.Model) or not loss_scaled(model):
        return
    defaults = _plain_loss_scale()
    own_settings = {"name", "built", "initial_scale", "dynamic_growth_steps", "loss_scale_factor"}
    for name, value in vars(model.optimizer).items():
        simple = value is None or isinstance(value, (bool, int, float, str))
        is_set = simple and value != defaults[name] if name in defaults else not callable(value)
        if is_set and name not in own_settings:
            setattr(model.optimizer.inner_optimizer, name, value)


class _GivenModel:
    """Returns a compiled model. Its copy in another process trains in the same way."""

    def __init__(self, model: keras.Model):
        self._model = model

    def __call__(self) -> keras.Model:
        return self._model

    def __reduce__(self):
        # Keras saves a lambda without the variables that it reads, so make its warning an error.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*includes a `lambda`")
            saved = pickle.dumps(self._model)
        policy = self._model.dtype_policy.name
        return _reread_model, (saved, accumulation_of(self._model), policy)


def _reread_model(
    pickled: bytes, accumulation: Accumulation | None, dtype_policy: str
) -> _GivenModel:
    # A Sequential model does not save its policy, which decides whether it has a loss scale.
    with dtype_policy_scope(dtype_policy):
        model = pickle.loads(pickled)
    return _GivenModel(model if accumulation is None else accumulation.apply(model))


class _FunctionHyperModel(keras_tuner.HyperModel):
    def __init__(self, function: BuildFunction):
        super().__init__(name=getattr(function, "__name__", None))
        self._function, self._takes_hp = function, True
        with contextlib.suppress(ValueError):  # Some builtins have no signature.
            self._takes_hp = any(
                p.name == "hp"
                or p.kind is p.VAR_POSITIONAL
                or (p.default is p.empty and p.kind is not p.VAR_KEYWORD)
                for p in inspect.signature(function).parameters.values()
            )

    def build(self, hp: keras_tuner.HyperParameters) -> Any:
        return self._function(hp) if self._takes_hp else self._function()
