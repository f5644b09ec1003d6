"""A record of how the learning rate and other settings followed the batch size."""

import dataclasses
from collections.abc import Sequence

from kbatch.analysis.learning_rates import batch_size_ratio, learning_rate_ratio
from kbatch.analysis.timescales import (
    FOLLOWERS,
    scale_batch_norm_momentum,
    scale_beta_2,
    scale_weight_decay,
)


@dataclasses.dataclass(frozen=True)
class LearningRateScaling:
    """What a rule was given and what it made of it.

    Attributes:
        rule: `"linear"`, `"sqrt"`, `"noise"` or None.
        batch_size: Batch size that was scaled to, in examples.
        base_batch_size: Batch size that was scaled from, in examples.
        noise_scale: Gradient noise scale that the rule used, in examples; None if it used none.
        kappa: Batch size over base batch size.
        learning_rate_ratio: Factor of the learning rate.
        learning_rate: The scaled learning rate.
        beta_2: Decay of Adam's second moment at the batch size; None where there is none.
        follow_batch_size: Which of the other settings followed the batch size; None where an
            earlier version of kbatch did not record it.
        weight_decay: Weight decay of the optimizer at the batch size; None where there is none.
        batch_norm_momenta: The different momenta of the model's BatchNormalization layers at the
            batch size, ascending, none without such layers; None where it was not recorded.
    """

    rule: str | None
    batch_size: int
    base_batch_size: int
    noise_scale: float | None
    kappa: float
    learning_rate_ratio: float
    learning_rate: float
    beta_2: float | None
    follow_batch_size: tuple[str, ...] | None = None
    weight_decay: float | None = None
    batch_norm_momenta: tuple[float, ...] | None = None


def learning_rate_scaling(
    learning_rate: float,
    beta_2: float | None = None,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    noise_scale: float | None = None,
    adaptive: bool | None = None,
    weight_decay: float | None = None,
    batch_norm_momenta: Sequence[float] = (),
    follow_batch_size: tuple[str, ...] = FOLLOWERS,
) -> LearningRateScaling:
    """Scales the settings of a training from one batch size to another, on record.

    Example:

    >>> learning_rate_scaling(1e-3, 0.99, batch_size=256, base_batch_size=64, rule="sqrt")
    LearningRateScaling(rule='sqrt', ..., kappa=4.0, learning_rate=0.002, beta_2=0.9606)

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        beta_2: Decay of the second moment that suits it, for an Adam-like optimizer; None for
            SGD.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that they were chosen for, in examples.
        rule: `"linear"`, `"sqrt"`, `"noise"` or None, which leaves the learning rate as it is.
        noise_scale: Gradient noise scale, in examples; for `rule="noise"` alone.
        adaptive: Whether the optimizer is Adam-like; if None, where there is a `beta_2`.
        weight_decay: Weight decay that suits it; None without one.
        batch_norm_momenta: Momenta of BatchNormalization layers that suit it.
        follow_batch_size: Which of `"beta_2"`, `"weight_decay"` and `"batch_norm_momentum"` keep
            their timescale in examples, under a rule or none; the others stay as they are.

    Returns:
        The scaled values with what led to them.

    Raises:
        ValueError: If the rule is unknown, a number out of range, or the rule is `"noise"` and
            the noise scale missing.
    """
    sizes = {"batch_size": batch_size, "base_batch_size": base_batch_size}
    if adaptive is None:
        adaptive = beta_2 is not None
    ratio = learning_rate_ratio(**sizes, rule=rule, noise_scale=noise_scale, adaptive=adaptive)
    if beta_2 is not None and "beta_2" in follow_batch_size:
        beta_2 = scale_beta_2(beta_2, **sizes)
    if weight_decay is not None and "weight_decay" in follow_batch_size:
        weight_decay = scale_weight_decay(weight_decay, **sizes, learning_rate_ratio=ratio)
    momenta = set(batch_norm_momenta)
    if "batch_norm_momentum" in follow_batch_size:
        momenta = {scale_batch_norm_momentum(momentum, **sizes) for momentum in momenta}
    return LearningRateScaling(
        rule=rule,
        **sizes,
        noise_scale=noise_scale if rule == "noise" else None,
        kappa=batch_size_ratio(**sizes),
        learning_rate_ratio=ratio,
        learning_rate=learning_rate * ratio,
        beta_2=beta_2,
        follow_batch_size=follow_batch_size,
        weight_decay=weight_decay,
        batch_norm_momenta=tuple(sorted(momenta)),
    )
