"""A record of how a learning-rate rule was applied."""

import dataclasses

from kbatch.analysis.learning_rates import batch_size_ratio, learning_rate_ratio, scale_beta_2


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
        beta_2: Scaled decay of Adam's second moment; None where there is none.
    """

    rule: str | None
    batch_size: int
    base_batch_size: int
    noise_scale: float | None
    kappa: float
    learning_rate_ratio: float
    learning_rate: float
    beta_2: float | None


def learning_rate_scaling(
    learning_rate: float,
    beta_2: float | None = None,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    noise_scale: float | None = None,
    adaptive: bool | None = None,
) -> LearningRateScaling:
    """Scales an optimizer's hyperparameters from one batch size to another, on record.

    Example:

    >>> learning_rate_scaling(1e-3, 0.99, batch_size=256, base_batch_size=64, rule="sqrt")
    LearningRateScaling(rule='sqrt', ..., kappa=4.0, learning_rate=0.002, beta_2=0.9606)

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        beta_2: Decay of the second moment that suits it, for an Adam-like optimizer; None for
            SGD.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that both were chosen for, in examples.
        rule: `"linear"`, `"sqrt"`, `"noise"` or None, which leaves `beta_2` as it is, too.
        noise_scale: Gradient noise scale, in examples; for `rule="noise"` alone.
        adaptive: Whether the optimizer is Adam-like; if None, where there is a `beta_2`.

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
    if beta_2 is not None and rule is not None:
        beta_2 = scale_beta_2(beta_2, **sizes)
    return LearningRateScaling(
        rule=rule,
        **sizes,
        noise_scale=noise_scale if rule == "noise" else None,
        kappa=batch_size_ratio(**sizes),
        learning_rate_ratio=ratio,
        learning_rate=learning_rate * ratio,
        beta_2=beta_2,
    )
