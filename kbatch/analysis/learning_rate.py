"""How the learning rate and other settings follow the batch size.

With kappa = batch_size / base_batch_size = B' / B the rules of the learning rate are

    linear    lr' = kappa lr          SGD; Goyal et al. (2017), arXiv:1706.02677, section 2.1
    sqrt      lr' = sqrt(kappa) lr    Adam-like; Malladi et al. (2022), arXiv:2205.10287, sec. 5

With rho the factor of the learning rate, other settings keep their timescale in examples:

    beta2'  = beta2 ** kappa         half-life of Adam's second moment
                                     (Marek et al. 2025, arXiv:2507.07101), but
                                     sqrt(beta2') > beta1 (arXiv:2603.02092)
    lambda' = lambda kappa / rho     tau = B / (eta lambda D), the passes over the data that the
                                     weights average over (Bergsma et al. 2025, arXiv:2505.13738;
                                     Wang and Aitchison 2024, arXiv:2405.13698)
    m'      = m ** kappa             half-life of BatchNormalization's moving statistics, and of
                                     the optimizer's moving average of the weights (`use_ema`)
                                     (Busbridge et al. 2023, arXiv:2307.13813, def. 1.2)

They hold whether or not the learning rate follows the batch size: without a rule rho is 1, and the
decay per example, eta lambda / B, stays as well. Where eta' lambda' would be above 1 it is 1: an
update cannot take away more than the whole weight, and a larger share would turn its sign.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RULES = ("linear", "sqrt")
# The hyperparameter of a search that holds the factor of the learning rate.
FACTOR_NAME = "learning_rate_factor"
# Factors of the learning rate that are tried around the rule's, in octaves: a rate of the user's
# that is 8 times wrong leaves two octaves on either side.
FACTORS = tuple(2.0**octave for octave in range(-5, 6))
FOLLOWERS = ("beta_2", "weight_decay", "batch_norm_momentum", "ema_momentum")


def scale_learning_rate(
    learning_rate: float, *, batch_size: int, base_batch_size: int, rule: str | None
) -> float:
    """Scale a learning rate from one batch size to another, in examples.

    Example:

    >>> scale_learning_rate(0.1, batch_size=256, base_batch_size=64, rule="linear")
    0.4

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        batch_size: Batch size to scale to.
        base_batch_size: Batch size that `learning_rate` was chosen for.
        rule: `"linear"` (SGD), `"sqrt"` (Adam-like) or None (left as it is).

    Raises:
        ValueError: If the rule is unknown, or a batch size is not positive.
    """
    sizes = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    return learning_rate * learning_rate_ratio(**sizes, rule=rule)


def learning_rate_ratio(*, batch_size: int, base_batch_size: int, rule: str | None) -> float:
    """Return the factor that a rule applies to the learning rate."""
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    match check_rule(rule, "rule"):
        case "linear":
            return kappa
        case "sqrt":
            return math.sqrt(kappa)
        case _:
            return 1.0


def batch_size_ratio(*, batch_size: int, base_batch_size: int) -> float:
    """Return kappa, the batch size over the base batch size."""
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            "`batch_size` and `base_batch_size` must be positive. "
            f"Received: batch_size={batch_size}, base_batch_size={base_batch_size}."
        )
    return batch_size / base_batch_size


def check_rule(rule: str | None, name: str, others: tuple[str, ...] = ()) -> str | None:
    """Check that a learning-rate rule exists, or is one of `others`."""
    if rule is not None and rule not in (*RULES, *others):
        also = "".join(f"{other!r}, " for other in others)
        raise ValueError(
            f"`{name}` must be {also}None, 'linear' (for SGD) or 'sqrt' (for Adam and its "
            f"relatives). Received: {name}={rule!r}."
        )
    return rule


def scale_beta_2(
    beta_2: float, beta_1: float | None = None, *, batch_size: int, base_batch_size: int
) -> float:
    """Scale the decay of Adam's second moment so that its half-life in examples stays.

    With the decay of the first moment it stops above `beta_1 ** 2`, below which Adam is unstable,
    by a hundredth of the way to 1; one that is given below that is not lowered.

    >>> scale_beta_2(0.99, batch_size=128, base_batch_size=64)
    0.9801
    """
    if not 0 <= beta_2 < 1:
        raise ValueError(f"`beta_2` must lie in [0, 1). Received: beta_2={beta_2}.")
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    floor = 0.0 if beta_1 is None else beta_1**2 + (1 - beta_1**2) / 100
    return max(beta_2**kappa, min(beta_2, floor))


def scale_weight_decay(
    weight_decay: float,
    *,
    batch_size: int,
    base_batch_size: int,
    learning_rate_ratio: float,
    learning_rate: float | None = None,
) -> float:
    """Scale a decoupled weight decay so that its timescale in examples stays.

    An update takes the share eta lambda of a weight away, as in Keras's AdamW. With the
    `learning_rate` of the base batch size, which need not be known, the share is at most 1.
    """
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    most = max(weight_decay, 1 / learning_rate) if learning_rate else math.inf
    return min(weight_decay * kappa, most) / learning_rate_ratio


def scale_momentum(momentum: float, *, batch_size: int, base_batch_size: int) -> float:
    """Scale the momentum of a moving average so that its half-life in examples stays."""
    return momentum ** batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)


def check_followers(names: Iterable[str]) -> tuple[str, ...]:
    asked = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if asked is None or any(one not in FOLLOWERS for one in asked):
        kind = TypeError if asked is None else ValueError
        raise kind(
            "`follow_batch_size` must be a tuple with some of "
            f"{', '.join(map(repr, FOLLOWERS))}, or () for none. "
            f"Received: follow_batch_size={names!r}."
        )
    return tuple(one for one in FOLLOWERS if one in asked)


@dataclasses.dataclass(frozen=True)
class LearningRateScaling:
    """What a rule was given and what it made of it."""

    rule: str | None  #: `"linear"`, `"sqrt"` or None.
    batch_size: int  #: Batch size that was scaled to, in examples.
    base_batch_size: int  #: Batch size that was scaled from, in examples.
    kappa: float  #: Batch size over base batch size.
    learning_rate_ratio: float  #: Factor of the learning rate.
    learning_rate: float  #: The scaled learning rate, of a schedule the highest.
    beta_2: float | None  #: Decay of Adam's second moment at the batch size; None without one.
    follow_batch_size: tuple[str, ...] = ()  #: Which other settings followed the batch size.
    weight_decay: float | None = None  #: Of the optimizer at the batch size; None without one.
    #: Of BatchNormalization layers at the batch size, ascending.
    batch_norm_momenta: tuple[float, ...] = ()
    factor: float = 1.0  #: Of the learning rate beside the rule's, which a race tried.
    #: Of the optimizer's moving average of the weights at the batch size; None without one.
    ema_momentum: float | None = None
    #: What the build function itself fits to the batch size, so that it was left as it is.
    fitted: tuple[str, ...] = ()
    #: What a model was left with, in its order: the learning rate of each optimizer, then all
    #: numbers that may follow. Empty where there was no model.
    values: tuple[float, ...] = ()
    #: What the build function gave those that follow, by name.
    given: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def values_of(self, follower: str) -> tuple[float, ...]:
        """Return what one of `FOLLOWERS` is at the batch size, empty where there is none."""
        if follower == "batch_norm_momentum":
            return self.batch_norm_momenta
        value = getattr(self, follower)
        return () if value is None else (value,)


def learning_rate_scaling(
    learning_rate: float,
    beta_2: float | None = None,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    weight_decay: float | None = None,
    batch_norm_momenta: Sequence[float] = (),
    ema_momentum: float | None = None,
    follow_batch_size: tuple[str, ...] = FOLLOWERS,
    factor: float = 1.0,
    beta_1: float | None = None,
) -> LearningRateScaling:
    """Scale the settings of a training from one batch size to another, on record.

    Example:

    >>> learning_rate_scaling(1e-3, 0.99, batch_size=256, base_batch_size=64, rule="sqrt")
    LearningRateScaling(rule='sqrt', ..., kappa=4.0, learning_rate=0.002, beta_2=0.9606)

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        beta_2: Decay of the second moment that suits it; None for SGD.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that they were chosen for, in examples.
        rule: As in `scale_learning_rate`.
        weight_decay: Weight decay that suits it; None without one.
        batch_norm_momenta: Momenta of BatchNormalization layers that suit it.
        ema_momentum: Momentum of the moving average of the weights that suits it; None without.
        follow_batch_size: Which of `"beta_2"`, `"weight_decay"`, `"batch_norm_momentum"` and
            `"ema_momentum"` keep their timescale in examples, under a rule or none; the others
            stay as they are.
        factor: What the scaled learning rate is multiplied by, above 0.
        beta_1: Decay of the first moment, whose square `beta_2` stays above; None without one.

    Raises:
        ValueError: If the rule is unknown, or a batch size out of range.
    """
    sizes: Any = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    ratio = factor * learning_rate_ratio(**sizes, rule=rule)
    one = {"beta_2": beta_2, "weight_decay": weight_decay, "ema_momentum": ema_momentum}
    given = {"batch_norm_momentum": tuple(sorted(set(batch_norm_momenta)))}
    given |= {name: (value,) for name, value in one.items() if value is not None}
    if beta_2 is not None and "beta_2" in follow_batch_size:
        beta_2 = scale_beta_2(beta_2, beta_1, **sizes)
    if weight_decay is not None and "weight_decay" in follow_batch_size:
        weight_decay = scale_weight_decay(
            weight_decay, **sizes, learning_rate_ratio=ratio, learning_rate=learning_rate
        )
    momenta = set(batch_norm_momenta)
    if "batch_norm_momentum" in follow_batch_size:
        momenta = {scale_momentum(momentum, **sizes) for momentum in momenta}
    if ema_momentum is not None and "ema_momentum" in follow_batch_size:
        ema_momentum = scale_momentum(ema_momentum, **sizes)
    return LearningRateScaling(
        rule=rule,
        **sizes,
        kappa=batch_size_ratio(**sizes),
        learning_rate_ratio=ratio,
        learning_rate=learning_rate * ratio,
        beta_2=beta_2,
        follow_batch_size=follow_batch_size,
        weight_decay=weight_decay,
        batch_norm_momenta=tuple(sorted(momenta)),
        factor=factor,
        ema_momentum=ema_momentum,
        given={name: given.get(name, ()) for name in follow_batch_size},
    )
