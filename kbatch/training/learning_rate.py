"""Scale the settings of a model with the batch size, or set those of a trial in a model.

In this module, `kappa` is the batch size divided by the base batch size.
"""

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

# Arguments of Keras's schedules that are learning rates, and arguments that count steps.
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")
_STEPS = ("decay_steps", "first_decay_steps", "warmup_steps")
_ROUNDING = 1e-6  # A relative difference above the rounding error of float32.
# The arguments of a custom schedule have no known meaning, so kbatch calls it for these updates.
_READ_AT_UPDATES = np.unique([0, *np.geomspace(1, 1e6, 300).astype("int64")])


def scale_optimizer(optimizer: Any, *, ratio: float, kappa: float) -> None:
    """Multiply the learning rate by `ratio`, and make a schedule run `kappa` times as fast."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    current: Any = rate_of(inner)
    # Always scale a schedule of Keras: with an integer rate it would compute with integers.
    if ratio == kappa == 1 and not _is_keras_schedule(current):
        return

    def scaled_rate() -> Any:
        return current() * ratio

    if isinstance(current, keras.Variable) or not callable(current):
        rate: Any = keras.ops.convert_to_numpy(current)
        inner.learning_rate = float(rate) * ratio
        return
    schedule = isinstance(current, Schedule)
    scaled = scaled_schedule(current, ratio=ratio, kappa=kappa) if schedule else scaled_rate
    inner.learning_rate = scaled
    vars(inner)[_SCHEDULE_NAME] = (current, scaled)


def scaled_schedule(schedule: Schedule, *, ratio: float, kappa: float) -> Schedule:
    """Return a schedule with `ratio` times the rates, which runs `kappa` times as fast."""
    # A schedule of Keras keeps its class, so that a saved model loads without kbatch.
    if not _is_keras_schedule(schedule):
        return _StretchedSchedule(schedule, ratio, kappa)
    config = {name: value for name, value in schedule.get_config().items() if value is not None}
    changes: dict[str, Any] = dict.fromkeys(_RATES, lambda rate: float(rate) * ratio)
    rounds_up = config.get("cycle", False)
    changes |= dict.fromkeys(_STEPS, lambda steps: _stage_steps(float(steps) / kappa, rounds_up))
    # Keras compares integer steps with the boundaries.
    changes["boundaries"] = lambda steps: math.floor(int(steps) / kappa + _ROUNDING)
    for name in changes.keys() & config.keys():
        config[name] = keras.tree.map_structure(changes[name], config[name])
    return type(schedule).from_config(config)


def _stage_steps(steps: float, rounds_up: bool) -> float:
    """Round the steps of a stage, so that float32 does not add or lose a stage at its end."""
    if float(np.float32(steps)) == steps:
        return steps
    return steps * (1 + _ROUNDING if rounds_up else 1 - _ROUNDING)


def peak_learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate, the highest rate of a schedule, or None if it is no number."""
    if optimizer is None:
        return None
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rate = rate_of(optimizer)
    if _is_keras_schedule(rate):
        config = rate.get_config()
        values = keras.tree.flatten([config[name] for name in _RATES if name in config])
        return max(float(value) for value in values if value is not None)
    if isinstance(rate, Schedule):
        rates = _rates(rate)
        return float(rates[np.isfinite(rates)].max(initial=0.0))
    return current_learning_rate(optimizer)


def current_learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of an optimizer, or None if it is a schedule or no number."""
    if optimizer is None or isinstance(rate_of(optimizer), Schedule):
        return None
    value: Any = keras.ops.convert_to_numpy(optimizer.learning_rate)
    return float(value) if value.size == 1 and np.isfinite(value) else None


def _is_keras_schedule(rate: Any) -> bool:
    return isinstance(rate, Schedule) and type(rate).__module__.split(".")[0] == "keras"


def _rates(schedule: Any) -> np.ndarray:
    return np.array([float(schedule(tf.constant(step))) for step in _READ_AT_UPDATES])


class _StretchedSchedule(Schedule):
    """A custom schedule with `ratio` times its rates, which runs `kappa` times as fast."""

    def __init__(self, schedule: Schedule, ratio: float, kappa: float):
        self.schedule, self.ratio, self.kappa = schedule, ratio, kappa

    def __call__(self, step: Any) -> Any:
        step = keras.ops.convert_to_tensor(step)
        number: Any = keras.ops.cast(step, "float32")
        rate: Any = self.schedule(keras.ops.cast(number * self.kappa, step.dtype))
        return rate * self.ratio

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "ratio": self.ratio, "kappa": self.kappa}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_StretchedSchedule":
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(**config | {"schedule": schedule})


_optimizers = keras.optimizers
# The argument for the decay of the second moment, with its optimizers. Lion is missing, because its
# `beta_2` is a decay of the first moment.
_SECOND_MOMENT_DECAYS = {
    "beta_2": (_optimizers.Adam, _optimizers.Adamax, _optimizers.Lamb, _optimizers.Nadam),
    "rho": (_optimizers.Adadelta, _optimizers.RMSprop),
    # Muon trains some variables as AdamW does, with separate settings.
    "adam_beta_2": (_optimizers.Muon,),
}
_FIRST_MOMENT_DECAYS = {"beta_2": "beta_1", "adam_beta_2": "adam_beta_1"}
_EMA_EVERY = "ema_overwrite_frequency"
# Names of attributes in which kbatch keeps two values, before and after scaling: the momentum of a
# layer, and the schedule of an optimizer.
MOMENTA_NAME = "_kbatch_momenta"
_SCHEDULE_NAME = "_kbatch_own_rate"


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
    """Scale the settings of a compiled model from the base batch size to another one.

    `base_model` is the model that the same build function returns for the base batch size. If a
    setting differs between the two models, the build function scales it, so kbatch does not.
    """
    layers, optimizers = batch_norms(model), inner_optimizers(model)
    if not optimizers:  # The user's train step changes the weights without an optimizer.
        return None
    sizes: Any = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    bases, names = optimizers, set(follow_batch_size)
    if base_model is not None:
        base_optimizers = inner_optimizers(base_model)
        if list(map(type, base_optimizers)) == list(map(type, optimizers)):
            bases = base_optimizers
        if [*map(_own_momentum, batch_norms(base_model))] != [*map(_own_momentum, layers)]:
            names -= {"batch_norm_momentum"}
    kappa = batch_size_ratio(**sizes)
    rates: list[float] = []  # For each optimizer: its learning rate, and its schedule's speed.
    given, made, followed = dict[str, set[float]](), dict[str, set[float]](), set[str]()
    scaling: Any = None  # At the end, that of the main optimizer, which the loop visits last.
    for optimizer, base in reversed(list(zip(optimizers, bases, strict=True))):
        own_rule: Any = automatic_rule(optimizer) if rule == "auto" else rule
        follows, differing = own_rule is not None, _differing_settings(optimizer, base)
        follow = names - differing
        followed |= follow
        rate, base_rate = peak_learning_rate(optimizer), peak_learning_rate(base)
        built_ratio = 1.0  # The build function multiplies the learning rate by this.
        if differing & {"learning_rate", *_RATES}:
            own_rule, built_ratio = None, rate / base_rate if rate and base_rate else 1.0
        ratio = factor * built_ratio * learning_rate_ratio(**sizes, rule=own_rule)
        steps_differ = bool(differing - {*_RATES, *FOLLOWERS})
        stretch = 1.0 if steps_differ or not follows else kappa
        if follows or factor != 1:
            scale_optimizer(optimizer, ratio=ratio / built_ratio, kappa=stretch)
        rates[:0] = [ratio * (1.0 if base_rate is None else base_rate), stretch]
        for name, follower in _followers(optimizer).items():
            value = getattr(optimizer, name)
            given.setdefault(follower, set()).add(value)
            if follower in follow:
                if follower == "beta_2":
                    beta_1 = getattr(optimizer, _FIRST_MOMENT_DECAYS.get(name, ""), None)
                    value = scale_beta_2(value, beta_1, **sizes)
                elif follower == "weight_decay":
                    value = scale_weight_decay(
                        value, **sizes, learning_rate_ratio=ratio, learning_rate=base_rate
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
    model.train_function = None  # An earlier trace contains the old values.
    return _scale_momenta(layers, optimizers, scaling, rates)


def automatic_rule(optimizer: Any) -> Rule | None:
    """Return the rule for SGD, or for Adam and similar optimizers. Others have none."""
    if isinstance(optimizer, _optimizers.SGD):
        return "linear"
    return "sqrt" if "beta_2" in _followers(optimizer).values() else None


def _followers(optimizer: Any) -> dict[str, str]:
    """Return the attributes that follow the batch size, with their names in `follow_batch_size`."""
    decays = ("weight_decay", "adam_weight_decay")
    kinds = {n: "weight_decay" for n in decays if getattr(optimizer, n, None) is not None}
    moments = (n for n, types in _SECOND_MOMENT_DECAYS.items() if isinstance(optimizer, types))
    kinds |= dict.fromkeys(moments, "beta_2")
    return kinds | ({"ema_momentum": "ema_momentum"} if optimizer.use_ema else {})


def set_scaling(model: keras.Model, scaling: LearningRateScaling) -> None:
    """Set the optimizer settings of a trial in a model. A second call changes nothing.

    The momenta of layers are set by `set_momenta`, when all layers are built.
    """
    optimizers = inner_optimizers(model)
    settings = _scaled_settings([], optimizers)
    if len(scaling.values) < (needed := 2 * len(optimizers) + len(settings)):
        raise ValueError(
            "The model must have as many optimizers as in the search: pass your build function to "
            f"`decision.apply`. Received: {len(optimizers)} optimizers with {needed} settings to "
            f"change, but the search stored only {len(scaling.values)} values."
        )
    values = iter(scaling.values)
    for optimizer in optimizers:
        rate, stretch = next(values), next(values)
        unscaled, scaled = vars(optimizer).get(_SCHEDULE_NAME, (None, None))
        if scaled is not None and rate_of(optimizer) is scaled:
            optimizer.learning_rate = unscaled
        if current := peak_learning_rate(optimizer):
            scale_optimizer(optimizer, ratio=rate / current, kappa=stretch)
    last = scaling.values[len(scaling.values) - len(settings) :]
    for (owner, name), value in zip(settings, last, strict=True):
        setattr(owner, name, int(value) if name == _EMA_EVERY else value)


def set_momenta(
    model: Any, scaling: LearningRateScaling | None, *, shapes: str | None = None
) -> bool:
    """Set the momenta of a trial's layers in a model, and return whether all layers are built.

    `shapes` is the `weight_shapes` of the trial. If None, it is not compared.

    Raises:
        ValueError: If all layers are built and differ from the layers of the trial.
    """
    built = all(layer.built for layer in layers_of(model))
    layers, optimizers = batch_norms(model), inner_optimizers(model)
    momenta: tuple[float, ...] = ()
    if scaling is not None:
        others = len(_scaled_settings([], optimizers))
        momenta = scaling.values[2 * len(optimizers) : len(scaling.values) - others]
    same = shapes in (None, weight_shapes(model))
    if same and len(momenta) in (0, len(layers)):
        for layer, value in zip(layers, momenta, strict=False):
            vars(layer)[MOMENTA_NAME] = (_own_momentum(layer), value)
            layer.momentum = value
    elif built:
        raise ValueError(
            "The model must have the same layers and weight shapes as in the trial: pass your "
            "build function to `decision.apply`, or build with `decision.trial.hyperparameters`. "
            f"Received: a model with {model.count_params():,} parameters."
        )
    return built


def weight_shapes(model: Any) -> str:
    """Return a fingerprint of the shapes of a model's weights."""
    shapes = sorted(tuple(weight.shape) for weight in model.weights)
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


def apply_settings(model: Any, run: ExecutionRecord, *, steps_per_execution: bool = True) -> Any:
    """Set the settings of a training run in a compiled model. A second call changes nothing."""
    check_compiled(model)
    if model.dtype_policy.name != run.dtype_policy:
        raise ValueError(
            "The model must have the dtype policy of the trials: pass your build function to "
            f'`decision.apply`, or call `keras.config.set_dtype_policy("{run.dtype_policy}")` and '
            f"build it again. Received: a model with dtype policy {model.dtype_policy.name}."
        )
    prepare = functools.partial(set_momenta, model, run.scaling, shapes=run.weight_shapes)
    built = prepare()  # If a layer is not built, the train step calls `prepare` again.
    if run.scaling is not None:
        set_scaling(model, run.scaling)
    # A search changes neither a custom step nor a model that the build function has cut.
    facts = ModelFacts(model)
    if not facts.own_step and facts.cut_by_user is None:
        size = run.micro_batch_size
        if size is not None and run.accumulation_steps != 1:
            Accumulation(size).apply(model)
        else:
            uninstall_step(model)
            sum_sparse_gradients(model)
    if built and not facts.own_step and not model.optimizer.built:
        # Some optimizers start an average at the weights only if they are built before training.
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    if installed_step(model) is None:
        TrainStep(model).install()  # Keras's step makes a further update after unsized data.
    installed_step(model).prepare = None if built else prepare
    if run.jit_compile and not model.run_eagerly:
        model.jit_compile = True
    if steps_per_execution and run.steps_per_execution is not None:
        model.steps_per_execution = run.steps_per_execution
    # Earlier traces contain the old values.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _differing_settings(optimizer: Any, base: Any) -> set[str]:
    """Return the names of settings that differ between optimizers of the same build function."""
    if optimizer is base:
        return set()
    differing = {
        follower
        for name, follower in _followers(optimizer).items()
        if getattr(optimizer, name) != getattr(base, name, None)
    }
    rate, base_rate = rate_of(optimizer), rate_of(base)
    if _is_keras_schedule(rate) and type(rate) is type(base_rate):
        base_config = base_rate.get_config()
        arguments = rate.get_config().items()
        return differing | {n for n, v in arguments if n != "name" and v != base_config[n]}
    if isinstance(rate, Schedule) and isinstance(base_rate, Schedule):
        equal = np.allclose(_rates(rate), _rates(base_rate), rtol=1e-5, equal_nan=True)
    else:
        equal = peak_learning_rate(optimizer) == peak_learning_rate(base)
    return differing if equal else {*differing, "learning_rate"}


def scale_late_layers(
    model: keras.Model, dataset: tf.data.Dataset, scaling: LearningRateScaling | None
) -> LearningRateScaling | None:
    """Build a model for its data, and scale layers that this creates. Return the new scaling."""
    if model.built or scaling is not None or user_step(model) is not None:
        build_ahead(model, dataset.element_spec)
    layers = batch_norms(model)
    if scaling is None or all(MOMENTA_NAME in vars(layer) for layer in layers):
        return scaling
    optimizers = inner_optimizers(model)
    model.train_function = None  # An earlier trace contains the old values.
    return _scale_momenta(layers, optimizers, scaling, scaling.values[: 2 * len(optimizers)])


def followed_settings(model: keras.Model) -> list[tuple[Any, str]]:
    """List the settings that follow the batch size, except learning rates, as (owner, name)."""
    settings = _scaled_settings(batch_norms(model), inner_optimizers(model))
    return [(owner, name) for owner, name in settings if name != _EMA_EVERY]


def _scaled_settings(layers: list[Any], optimizers: list[Any]) -> list[tuple[Any, str]]:
    """List all settings that `scale_model` may change, except learning rates, as (owner, name)."""
    averaging = [o for o in optimizers if o.use_ema and getattr(o, _EMA_EVERY)]
    return [
        *((layer, "momentum") for layer in layers),
        *((optimizer, name) for optimizer in optimizers for name in _followers(optimizer)),
        *((optimizer, _EMA_EVERY) for optimizer in averaging),
    ]


def _scale_momenta(
    layers: list[Any], optimizers: list[Any], scaling: LearningRateScaling, rates: Sequence[float]
) -> LearningRateScaling:
    """Scale the momenta of all layers. Return the scaling with the values of all settings."""
    sizes = {"batch_size": scaling.batch_size, "base_batch_size": scaling.base_batch_size}
    name = "batch_norm_momentum"
    for layer in layers:
        unscaled = momentum = _own_momentum(layer)
        if name in scaling.follow_batch_size:
            momentum = scale_momentum(unscaled, **sizes)
        layer.momentum = momentum
        vars(layer)[MOMENTA_NAME] = (unscaled, momentum)
    given, made = dict(scaling.given), dict(scaling.made)
    if layers:
        pairs = zip(*(vars(layer)[MOMENTA_NAME] for layer in layers), strict=True)
        given[name], made[name] = (tuple(sorted(set(momenta))) for momenta in pairs)
    settings = _scaled_settings(layers, optimizers)
    values = (*rates, *(float(getattr(owner, name)) for owner, name in settings))
    return dataclasses.replace(scaling, given=given, made=made, values=values)


def _own_momentum(layer: Any) -> float:
    """Return the momentum that the user gave a layer, before kbatch scaled it."""
    unscaled, scaled = vars(layer).get(MOMENTA_NAME, (layer.momentum, layer.momentum))
    return unscaled if layer.momentum == scaled else layer.momentum
