"""What a person gave to be tuned: a build function or a HyperModel."""

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
from kbatch.library_internals import left_to_keras, metrics_in_float32
from kbatch.training.accumulation import Accumulation
from kbatch.training.dtype_policy import check_own_dtypes, dtype_policy_scope
from kbatch.training.model import accumulation_of, loss_scaled
from kbatch.training.state import seeded

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


def build_under(
    hypermodel: keras_tuner.HyperModel, hp: Any, seed: int | None, policy: str | None
) -> Any:
    """Build a model with a seed and under a dtype policy; if None, those that are set are used.

    Raises:
        PolicyUnsupported: If the model cannot be built under the policy.
    """
    scope = contextlib.nullcontext() if policy is None else dtype_policy_scope(policy)
    with scope, seeded(seed), left_to_keras() as found:
        model: Any = hypermodel.build(hp)
    if isinstance(model, keras.Model):
        model.chooses_xla = any(model is one for one in found)
        if not hasattr(model, "optimizer"):
            model.optimizer = None  # It is not compiled yet.
    if policy is not None:
        check_own_dtypes(model, policy)
        metrics_in_float32(model)
        settings_to_inner(model)
    return model


def model_of(
    given: "keras_tuner.HyperModel | BuildFunction | keras.Model",
    hyperparameters: Mapping[str, Any],
    policy: str,
) -> keras.Model:
    """Return a model as it is, or build one with these hyperparameters and dtype policy."""
    if isinstance(given, keras.Model):
        settings_to_inner(given)
        return given
    hp = keras_tuner.HyperParameters()
    hp.values = dict(hyperparameters)
    hypermodel = as_hypermodel(given)
    # A `BatchSizeHyperModel` would choose the policy and scale the settings itself.
    return build_under(getattr(hypermodel, "wrapped", hypermodel), hp, None, policy)


@functools.cache
def _plain_loss_scale() -> dict[str, Any]:
    """Return the attributes of a loss scale on which nothing was set, without its variables."""
    made = vars(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    return {n: v if isinstance(v, (bool, int, float, str)) else None for n, v in made.items()}


def settings_to_inner(model: Any) -> None:
    """Set on the optimizer in a loss scale what was set on the loss scale after `compile`.

    `compile` puts the loss scale around an optimizer under mixed_float16. Keras's loss scale has
    all settings of an optimizer, such as `clipnorm` or `exclude_from_weight_decay`, and uses none.
    """
    if not isinstance(model, keras.Model) or not loss_scaled(model):
        return
    plain = _plain_loss_scale()
    own = {"name", "built", "initial_scale", "dynamic_growth_steps", "loss_scale_factor"}
    for name, value in vars(model.optimizer).items():
        simple = value is None or isinstance(value, (bool, int, float, str))
        is_set = simple and value != plain[name] if name in plain else not callable(value)
        if is_set and name not in own:
            setattr(model.optimizer.inner_optimizer, name, value)


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
