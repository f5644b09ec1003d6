"""How the learning rate and other settings follow the batch size.

With kappa = batch_size / base_batch_size = B' / B, the rules of the learning rate are

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

These formulas also hold if the learning rate does not follow the batch size: then rho is 1, and the
decay per example, eta lambda / B, stays the same. eta' lambda' is at most 1, because a larger share
of the weight would change its sign.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

Rule = Literal["linear", "sqrt"]
RULES = ("linear", "sqrt")
# Name of the search's hyperparameter that multiplies the learning rate.
FACTOR_NAME = "learning_rate_factor"
# Factors of the rule's learning rate that a search may try.
FACTORS = tuple(2.0**octave for octave in range(-5, 6))
FOLLOWERS = ("beta_2", "weight_decay", "batch_norm_momentum", "ema_momentum")


def scale_learning_rate(
    learning_rate: float, *, batch_size: int, base_batch_size: int, rule: str | None
) -> float:
    """Scale a learning rate from one batch size to another.

    "linear" multiplies it by `batch_size / base_batch_size` (Goyal et al. 2017, arXiv:1706.02677),
    and "sqrt" by the square root of this ratio (Malladi et al. 2022, arXiv:2205.10287).

    Example:

    >>> scale_learning_rate(0.1, batch_size=256, base_batch_size=64, rule="linear")
    0.4

    Args:
        learning_rate: Float. Learning rate that suits `base_batch_size`.
        batch_size: Integer. Batch size to scale to, in examples.
        base_batch_size: Integer. Batch size that `learning_rate` was chosen for, in examples.
        rule: `"linear"` (for SGD) or `"sqrt"` (for Adam and similar ones). If None, no change.

    Returns:
        The scaled learning rate as a `float`.

    Raises:
        ValueError: If the rule is unknown, or a batch size is not positive.
    """
    sizes = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    return learning_rate * learning_rate_ratio(**sizes, rule=rule)


def learning_rate_ratio(*, batch_size: int, base_batch_size: int, rule: str | None) -> float:
    """Return the factor that a rule applies to the learning rate."""
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    return {"linear": kappa, "sqrt": math.sqrt(kappa), None: 1.0}[check_rule(rule, "rule")]


def batch_size_ratio(*, batch_size: int, base_batch_size: int) -> float:
    """Return kappa, the batch size divided by the base batch size."""
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            "`batch_size` and `base_batch_size` must be positive. "
            f"Received: batch_size={batch_size}, base_batch_size={base_batch_size}."
        )
    return batch_size / base_batch_size


def check_rule(rule: str | None, name: str, others: tuple[str, ...] = ()) -> str | None:
    """Check that a learning-rate rule is None, a name in `RULES` or one of `others`."""
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
    """Scale Adam's `beta_2` so that its half-life in examples stays the same.

    >>> scale_beta_2(0.99, batch_size=128, base_batch_size=64)
    0.9801

    Args:
        beta_2: Float in [0, 1), which suits `base_batch_size`.
        beta_1: Float, Adam's `beta_1`. The result stays above its square, because Adam is unstable
            below it. A `beta_2` that is below it already does not change. If None, no limit.
        batch_size: Integer, the batch size to scale to, in examples.
        base_batch_size: Integer, the batch size to scale from, in examples.

    Returns:
        The scaled `beta_2` as a `float`.

    Raises:
        ValueError: If `beta_2` is out of range, or a batch size is not positive.
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
    """Scale a decoupled weight decay so that its timescale in examples stays the same.

    An update subtracts the share eta lambda of a weight, as in Keras's AdamW. If the
    `learning_rate` of the base batch size is given, the share is limited to 1.
    """
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    most = max(weight_decay, 1 / learning_rate) if learning_rate else math.inf
    return min(weight_decay * kappa, most) / learning_rate_ratio


def scale_momentum(momentum: float, *, batch_size: int, base_batch_size: int) -> float:
    """Scale the momentum of a moving average so that its half-life in examples stays the same."""
    return momentum ** batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)


def names_rate(name: str) -> bool:
    """Return whether the name of a hyperparameter says that it is a learning rate."""
    return re.search(r"(^|[^a-z])(lr|learning.?rate)$", name.lower()) is not None


def check_followers(names: Iterable[str]) -> tuple[str, ...]:
    """Check the argument `follow_batch_size`, and return its names in the order of `FOLLOWERS`."""
    followers = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if followers is None or any(name not in FOLLOWERS for name in followers):
        raise (TypeError if followers is None else ValueError)(
            f"`follow_batch_size` must be a tuple with any of {', '.join(map(repr, FOLLOWERS))}: "
            "the hyperparameters that kbatch changes with the batch size. Give () to change none. "
            f"Received: follow_batch_size={names!r}."
        )
    return tuple(name for name in FOLLOWERS if name in followers)


@dataclasses.dataclass(frozen=True)
class LearningRateScaling:
    """The settings before and after they were scaled to a batch size."""

    rule: Rule | None
    batch_size: int  #: Batch size that was scaled to, in examples.
    base_batch_size: int  #: Batch size that was scaled from, in examples.
    learning_rate_ratio: float  #: Factor of the learning rate.
    learning_rate: float  #: The scaled learning rate. Of a schedule, its largest value.
    follow_batch_size: tuple[str, ...] = ()  #: Which other settings followed the batch size.
    #: Values in the built model of settings that may follow, by name. Each value appears once.
    given: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    #: The values that `given` has after scaling to the batch size.
    made: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    #: The values of the scaled model: each optimizer's learning rate and the steps of its schedule
    #: that an update takes, then all other numbers that may follow the batch size.
    values: tuple[float, ...] = ()

    def __post_init__(self):
        if not (ratio := self.learning_rate_ratio) > 0:
            raise ValueError(f"`learning_rate_ratio` must be positive. Received: {ratio}.")
