"""The settings of a model: those that follow the batch size, and all as a trial had them."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.learning_rate import (
    FOLLOWERS,
    LearningRateScaling,
    Rule,
    batch_size_ratio,
    learning_rate_ratio,
    scale_beta_2,
    scale_momentum,
    scale_weight_decay,
)
from kbatch.library_internals import layers_of, rate_of
from kbatch.records.training_run import ExecutionRecord
from kbatch.training.accumulation import Accumulation, sum_sparse_gradients
from kbatch.training.model import (
    ModelFacts,
    TrainStep,
    batch_norms,
    build_ahead,
    check_compiled,
    inner_optimizers,
    installed_step,
    uninstall_step,
    user_step,
)

Schedule = keras.optimizers.schedules.LearningRateSchedule

# Arguments of Keras's schedules that are learning rates, and those that count steps.
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")
_STEPS = ("decay_steps", "first_decay_steps", "warmup_steps")
_CLOSE = 1e-6  # More than float32 rounds off.


def scale_optimizer(optimizer: Any, *, ratio: float, kappa: float) -> None:
    """Scale the learning rate in place; a schedule spans as many examples as before."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    current: Any = rate_of(inner)
    # A schedule of Keras with an integer rate computes with integers: it gets one of floats.
    if ratio == kappa == 1 and not _is_keras_schedule(current):
        return

    def read_scaled() -> Any:
        return current() * ratio

    if isinstance(current, keras.Variable) or not callable(current):
        rate: Any = keras.ops.convert_to_numpy(current)
        inner.learning_rate = float(rate) * ratio
        return
    schedule = isinstance(current, Schedule)
    scaled = scaled_schedule(current, ratio=ratio, kappa=kappa) if schedule else read_scaled
    inner.learning_rate = scaled
    vars(inner)[_OWN_RATE] = (current, scaled)


def scaled_schedule(schedule: Schedule, *, ratio: float, kappa: float) -> Schedule:
    """Make a schedule of `ratio` times the rates over the same number of examples."""
    # One of Keras's own stays one, so that a saved model loads without kbatch.
    if not _is_keras_schedule(schedule):
        return _StretchedSchedule(schedule, ratio, kappa)
    config = {name: value for name, value in schedule.get_config().items() if value is not None}
    changes: dict[str, Any] = dict.fromkeys(_RATES, lambda rate: float(rate) * ratio)
    rounds_up = config.get("cycle", False)
    changes |= dict.fromkeys(_STEPS, lambda steps: _stage(float(steps) / kappa, rounds_up))
    # Keras compares whole steps with these.
    changes["boundaries"] = lambda steps: math.floor(int(steps) / kappa + _CLOSE)
    for name in changes.keys() & config.keys():
        config[name] = keras.tree.map_structure(changes[name], config[name])
    return type(schedule).from_config(config)


def _stage(steps: float, rounds_up: bool) -> float:
    """Return the steps of a stage so that float32 counts whole stages: 10 / (10 / 3) as 3."""
    if float(np.float32(steps)) == steps:
        return steps
    return steps * (1 + _CLOSE if rounds_up else 1 - _CLOSE)


def peak_learning_rate(optimizer: Any) -> float | None:
    """Read the learning rate, the highest of a schedule; None if it is no scalar."""
    if optimizer is None:
        return None
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = rate_of(optimizer)
    if _is_keras_schedule(rate):
        config = rate.get_config()
        given = keras.tree.flatten([config[name] for name in _RATES if name in config])
        return max(float(one) for one in given if one is not None)
    if isinstance(rate, Schedule):
        rates = _rates(rate)
        return float(rates[np.isfinite(rates)].max(initial=0.0))
    return current_learning_rate(optimizer)


def current_learning_rate(optimizer: Any) -> float | None:
    """Read the learning rate that a callback may set; None if it is no number, or a schedule's."""
    if optimizer is None or isinstance(rate_of(optimizer), Schedule):
        return None
    value: Any = keras.ops.convert_to_numpy(optimizer.learning_rate)
    return float(value) if value.size == 1 and np.isfinite(value) else None


def _is_keras_schedule(rate: Any) -> bool:
    return isinstance(rate, Schedule) and type(rate).__module__.split(".")[0] == "keras"


# Updates at which a schedule of the user's own is read, whose arguments have no known meaning.
_UPDATES = np.unique([0, *np.geomspace(1, 1e6, 300).astype("int64")])


def _rates(schedule: Any) -> np.ndarray:
    return np.array([float(schedule(tf.constant(step))) for step in _UPDATES])


class _StretchedSchedule(Schedule):
    """A user's own schedule, read `kappa` times as fast."""

    def __init__(self, schedule: Schedule, ratio: float, kappa: float):
        self.schedule = schedule
        self.ratio = ratio
        self.kappa = kappa

    def __call__(self, step: Any) -> Any:
        step = keras.ops.convert_to_tensor(step)
        whole: Any = keras.ops.cast(step, "float32")
        rate: Any = self.schedule(keras.ops.cast(whole * self.kappa, step.dtype))
        return rate * self.ratio

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "ratio": self.ratio, "kappa": self.kappa}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_StretchedSchedule":
        return cls(
            **config | {"schedule": keras.saving.deserialize_keras_object(config["schedule"])}
        )


_optimizers = keras.optimizers
# The decay of the second moment, by optimizer. Lion's `beta_2` is one of the first moment.
_SECOND_MOMENT_DECAYS = {
    "beta_2": (_optimizers.Adam, _optimizers.Adamax, _optimizers.Lamb, _optimizers.Nadam),
    "rho": (_optimizers.Adadelta, _optimizers.RMSprop),
    # It trains some variables as AdamW does, with settings of their own.
    "adam_beta_2": (_optimizers.Muon,),
}
_FIRST_MOMENT_DECAYS = {"beta_2": "beta_1", "adam_beta_2": "adam_beta_1"}
_EMA_EVERY = "ema_overwrite_frequency"
REMEMBERED = "_kbatch_momenta"
_OWN_RATE = "_kbatch_own_rate"


def scale_model(
    model: keras.Model,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    follow_batch_size: tuple[str, ...],
    factor: float = 1.0,
    base_model: keras.Model | None = None,
) -> LearningRateScaling | None:
    """Scale the settings of a compiled model from one batch size to another.

    Those that differ from `base_model`, which the same function built for the base batch size,
    follow the batch size by themselves, and are left as they are.
    """
    layers, optimizers = batch_norms(model), inner_optimizers(model)
    if not optimizers:  # A step of the user's own changes the weights by itself.
        return None
    sizes: Any = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    bases, fitted = optimizers, set[str]()
    if base_model is not None:
        found, momenta = inner_optimizers(base_model), map(_own_momentum, batch_norms(base_model))
        if list(map(type, found)) == list(map(type, optimizers)):
            bases = found
        if list(momenta) != list(map(_own_momentum, layers)):
            fitted |= {"batch_norm_momentum"} & set(follow_batch_size)
    kappa = batch_size_ratio(**sizes)
    rates: list[float] = []  # Each with how many times as fast a schedule is read.
    given, made, followed = dict[str, set[float]](), dict[str, set[float]](), set[str]()
    scaling: Any = None  # Of the main one, which comes last; each optimizer follows by itself.
    for optimizer, base in reversed(list(zip(optimizers, bases, strict=True))):
        own_rule: Any = automatic_rule(optimizer) if rule == "auto" else rule
        follows, apart = own_rule is not None, _settings_apart(optimizer, base)
        follow = {*follow_batch_size} - fitted - apart
        followed |= follow
        own, rate = peak_learning_rate(optimizer), peak_learning_rate(base)
        by_itself = 1.0  # What the build function multiplies the learning rate by.
        if apart & {"learning_rate", *_RATES}:
            own_rule, by_itself = None, own / rate if own and rate else 1.0
        ratio = factor * by_itself * learning_rate_ratio(**sizes, rule=own_rule)
        steps_fit = bool(apart - {*_RATES, *FOLLOWERS})
        stretch = 1.0 if steps_fit or not follows else kappa
        if follows or factor != 1:
            scale_optimizer(optimizer, ratio=ratio / by_itself, kappa=stretch)
        rates[:0] = [ratio * (1.0 if rate is None else rate), stretch]
        for name, follower in _followers(optimizer).items():
            value = getattr(optimizer, name)
            given.setdefault(follower, set()).add(value)
            if follower in follow:
                if follower == "beta_2":
                    beta_1 = getattr(optimizer, _FIRST_MOMENT_DECAYS.get(name, ""), None)
                    value = scale_beta_2(value, beta_1, **sizes)
                elif follower == "weight_decay":
                    value = scale_weight_decay(
                        value, **sizes, learning_rate_ratio=ratio, learning_rate=rate
                    )
                else:
                    value = scale_momentum(value, **sizes)
                setattr(optimizer, name, value)
            made.setdefault(follower, set()).add(value)
        every = optimizer.use_ema and optimizer.ema_overwrite_frequency
        if every and "ema_momentum" in follow:
            optimizer.ema_overwrite_frequency = max(1, round(every / kappa))
        scaling = LearningRateScaling(
            rule=own_rule,
            **sizes,
            learning_rate_ratio=ratio,
            learning_rate=rates[0],
            follow_batch_size=tuple(name for name in follow_batch_size if name in followed),
            given={name: tuple(sorted(values)) for name, values in given.items()},
            made={name: tuple(sorted(values)) for name, values in made.items()},
        )
    model.train_function = None  # One that was traced before has the former values in it.
    return _scale_momenta(layers, optimizers, scaling, rates)


def automatic_rule(optimizer: Any) -> Rule | None:
    """Return the rule for SGD, or for Adam and its kin; for others there is none."""
    if isinstance(optimizer, _optimizers.SGD):
        return "linear"
    return "sqrt" if "beta_2" in _followers(optimizer).values() else None


def _followers(optimizer: Any) -> dict[str, str]:
    """Return the settings of an optimizer that follow the batch size, each as which of them."""
    decays = ("weight_decay", "adam_weight_decay")
    found = {n: "weight_decay" for n in decays if getattr(optimizer, n, None) is not None}
    moments = (n for n, kinds in _SECOND_MOMENT_DECAYS.items() if isinstance(optimizer, kinds))
    found |= dict.fromkeys(moments, "beta_2")
    return found | ({"ema_momentum": "ema_momentum"} if optimizer.use_ema else {})


def set_scaling(model: keras.Model, scaling: LearningRateScaling) -> None:
    """Set in a model what `scale_model` left in that of a trial; a second call changes nothing.

    Of layers that the first batch builds, `set_momenta` sets the momenta once they are there.
    """
    optimizers = inner_optimizers(model)
    numbers = _owners_of_numbers([], optimizers)
    if len(scaling.values) < 2 * len(optimizers) + len(numbers):
        raise ValueError(
            "The model must have the optimizers of the trials. "
            f"Received: {len(optimizers)} optimizers with {len(numbers)} settings."
        )
    values = iter(scaling.values)
    for optimizer in optimizers:
        rate, stretch = next(values), next(values)
        own, ours = vars(optimizer).get(_OWN_RATE, (None, None))
        if ours is not None and rate_of(optimizer) is ours:
            optimizer.learning_rate = own
        if given := peak_learning_rate(optimizer):
            scale_optimizer(optimizer, ratio=rate / given, kappa=stretch)
    last = scaling.values[len(scaling.values) - len(numbers) :]
    for (owner, name), value in zip(numbers, last, strict=True):
        setattr(owner, name, int(value) if name == _EMA_EVERY else value)


def set_momenta(
    model: Any, scaling: LearningRateScaling | None, *, shapes: str | None = None
) -> bool:
    """Set the momenta of a trial's layers in those of a model; return whether all are built.

    `shapes` is the fingerprint of the shapes of the trial's weights, if it is known.

    Raises:
        ValueError: If all layers are built, and they are not those of the trial.
    """
    built = all(layer.built for layer in layers_of(model))
    layers, optimizers = batch_norms(model), inner_optimizers(model)
    momenta: tuple[float, ...] = ()
    if scaling is not None:
        others = len(_owners_of_numbers([], optimizers))
        momenta = scaling.values[2 * len(optimizers) : len(scaling.values) - others]
    same = shapes in (None, weight_shapes(model))
    if same and len(momenta) in (0, len(layers)):
        for layer, value in zip(layers, momenta, strict=False):
            vars(layer)[REMEMBERED] = (_own_momentum(layer), value)
            layer.momentum = value
    elif built:
        raise ValueError(
            "The model must have the layers of the trial, with weights of the same shapes: give "
            "`decision.apply` the build function of the search, or build the model with "
            "`decision.trial.hyperparameters`. "
            f"Received: a model with {model.count_params():,} parameters."
        )
    return built


def weight_shapes(model: Any) -> str:
    """Return a fingerprint of the shapes of a model's weights."""
    shapes = sorted(tuple(weight.shape) for weight in model.weights)
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


def apply_settings(model: Any, run: ExecutionRecord, *, steps_per_execution: bool = True) -> Any:
    """Set in a compiled model the values of an execution; a second call changes nothing."""
    check_compiled(model)
    if model.dtype_policy.name != run.dtype_policy:
        raise ValueError(
            "The model must have the dtype policy of the trials: give `decision.apply` your build "
            f'function, or call `keras.config.set_dtype_policy("{run.dtype_policy}")` before you '
            "build the model. "
            f"Received: a model under {model.dtype_policy.name}."
        )
    prepare = functools.partial(set_momenta, model, run.scaling, shapes=run.weight_shapes)
    built = prepare()  # If layers are missing, the first batch builds them.
    if run.scaling is not None:
        set_scaling(model, run.scaling)
    # What the build function cuts, and a step of the user's own, trained as it is.
    facts = ModelFacts(model)
    if not facts.own_step and facts.cut_by_user is None:
        size = run.micro_batch_size
        if size is not None and run.accumulation_steps != 1:
            Accumulation(size).apply(model)
        else:
            uninstall_step(model)
            sum_sparse_gradients(model)
    if built and not facts.own_step and not model.optimizer.built:
        # Some optimizers take the weights as the start of an average only if they are built here.
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    if installed_step(model) is None:
        TrainStep(model).install()  # It makes no update at the end of data of unknown length.
    installed_step(model).prepare = None if built else prepare
    if run.jit_compile and not model.run_eagerly:
        model.jit_compile = True
    if steps_per_execution and run.steps_per_execution is not None:
        model.steps_per_execution = run.steps_per_execution
    # What was traced before has the former values in it.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _settings_apart(optimizer: Any, base: Any) -> set[str]:
    """Name what differs between the optimizers that were built for two batch sizes."""
    if optimizer is base:
        return set()
    apart = {
        follower
        for name, follower in _followers(optimizer).items()
        if getattr(optimizer, name) != getattr(base, name, None)
    }
    one, other = rate_of(optimizer), rate_of(base)
    if _is_keras_schedule(one) and type(one) is type(other):
        configs = one.get_config(), other.get_config()
        return apart | {n for n, v in configs[0].items() if n != "name" and v != configs[1][n]}
    if isinstance(one, Schedule) and isinstance(other, Schedule):
        alike = np.allclose(_rates(one), _rates(other), rtol=1e-5, equal_nan=True)
    else:
        alike = peak_learning_rate(optimizer) == peak_learning_rate(base)
    return apart if alike else {*apart, "learning_rate"}


def scale_late_layers(
    model: keras.Model, dataset: tf.data.Dataset, scaling: LearningRateScaling | None
) -> LearningRateScaling | None:
    """Build a model for its data; return what it was scaled by, layers made in a `build` too."""
    if model.built or scaling is not None or user_step(model) is not None:
        build_ahead(model, dataset.element_spec)
    layers = batch_norms(model)
    if scaling is None or all(REMEMBERED in vars(one) for one in layers):
        return scaling
    optimizers = inner_optimizers(model)
    model.train_function = None  # As above.
    return _scale_momenta(layers, optimizers, scaling, scaling.values[: 2 * len(optimizers)])


def followed_settings(model: keras.Model) -> list[tuple[Any, str]]:
    """List the settings that follow the batch size, but for the rate: an owner and a name each."""
    return _settings_of(batch_norms(model), inner_optimizers(model))


def _settings_of(layers: list[Any], optimizers: list[Any]) -> list[tuple[Any, str]]:
    of_optimizers = [(one, name) for one in optimizers for name in _followers(one)]
    return [*((layer, "momentum") for layer in layers), *of_optimizers]


def _owners_of_numbers(layers: list[Any], optimizers: list[Any]) -> list[tuple[Any, str]]:
    """List all that `scale_model` may change but for the rates: an owner and a name each."""
    averaging = (one for one in optimizers if one.use_ema and getattr(one, _EMA_EVERY))
    return [*_settings_of(layers, optimizers), *((one, _EMA_EVERY) for one in averaging)]


def _scale_momenta(
    layers: list[Any], optimizers: list[Any], scaling: LearningRateScaling, rates: Sequence[float]
) -> LearningRateScaling:
    """Scale the momenta of all layers, and note all that a model was left with."""
    sizes = {"batch_size": scaling.batch_size, "base_batch_size": scaling.base_batch_size}
    name = "batch_norm_momentum"
    for layer in layers:
        own = momentum = _own_momentum(layer)
        if name in scaling.follow_batch_size:
            momentum = scale_momentum(own, **sizes)
        layer.momentum = momentum
        vars(layer)[REMEMBERED] = (own, momentum)
    given, made = dict(scaling.given), dict(scaling.made)
    if layers:
        pairs = zip(*(vars(layer)[REMEMBERED] for layer in layers), strict=True)
        given[name], made[name] = (tuple(sorted(set(each))) for each in pairs)
    owners = _owners_of_numbers(layers, optimizers)
    numbers = [float(getattr(owner, name)) for owner, name in owners]
    return dataclasses.replace(scaling, given=given, made=made, values=(*rates, *numbers))


def _own_momentum(layer: Any) -> float:
    """Return the momentum that a person gave a layer, whatever a model before made of it."""
    own, scaled = vars(layer).get(REMEMBERED, (layer.momentum, layer.momentum))
    return own if layer.momentum == scaled else layer.momentum
