"""Learning-rate rules: how the learning rate follows the batch size.

With kappa = batch_size / base_batch_size = B' / B:

    linear    lr' = kappa lr          SGD; Goyal et al. (2017), arXiv:1706.02677, section 2.1
    sqrt      lr' = sqrt(kappa) lr    Adam-like; Malladi et al. (2022), arXiv:2205.10287, sec. 5
    noise     lr' = gain lr           SGD; gain = kappa (B_noise + B) / (B_noise + B')
              lr' = sqrt(gain) lr     Adam-like

The gain follows from the best learning rate of a batch, lr_max / (1 + B_noise / B) (McCandlish
et al. 2018, arXiv:1812.06162, equation 2.6), and is AdaScale's gain ratio (Johnson et al. 2020,
arXiv:2007.05105, section 3). It is kappa times the statistical efficiency: the linear rule far
below B_noise, and no further growth far above, where it tends to (B_noise + B) / B. For Adam
McCandlish et al. found exponents between 0.5 and 1 in place of SGD's 1; the root is the choice
that meets the sqrt rule far below B_noise.
"""

import math

RULES = ("linear", "sqrt", "noise")


def scale_learning_rate(
    learning_rate: float,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    noise_scale: float | None = None,
    adaptive: bool = False,
) -> float:
    """Scales a learning rate from one batch size to another.

    Example:

    >>> scale_learning_rate(0.1, batch_size=256, base_batch_size=64, rule="linear")
    0.4

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that `learning_rate` was chosen for, in examples.
        rule: `"linear"` (SGD), `"sqrt"` (Adam-like), `"noise"` (either, by the noise scale) or
            `None` (left as it is).
        noise_scale: Gradient noise scale, in examples; for `rule="noise"` alone.
        adaptive: Whether the optimizer is Adam-like; for `rule="noise"` alone.

    Returns:
        The scaled learning rate.

    Raises:
        ValueError: If the rule is unknown, a batch size is not positive, or the rule is
            `"noise"` and the noise scale missing or negative.
    """
    return learning_rate * learning_rate_ratio(
        batch_size=batch_size,
        base_batch_size=base_batch_size,
        rule=rule,
        noise_scale=noise_scale,
        adaptive=adaptive,
    )


def learning_rate_ratio(
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str | None,
    noise_scale: float | None = None,
    adaptive: bool = False,
) -> float:
    """Gives the factor that a rule applies to the learning rate.

    Args:
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that the learning rate was chosen for, in examples.
        rule: `"linear"`, `"sqrt"`, `"noise"` or `None`.
        noise_scale: Gradient noise scale, in examples; for `rule="noise"` alone.
        adaptive: Whether the optimizer is Adam-like; for `rule="noise"` alone.

    Returns:
        kappa, its square root, the gain or its square root, or 1.

    Raises:
        ValueError: If the rule is unknown, a batch size is not positive, or the rule is
            `"noise"` and the noise scale missing or negative.
    """
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    match check_rule(rule, "rule"):
        case "noise" if kappa != 1:
            scale = _check_noise_scale(noise_scale)
            gain = kappa * (scale + base_batch_size) / (scale + batch_size)
            return math.sqrt(gain) if adaptive else gain
        case "linear":
            return kappa
        case "sqrt":
            return math.sqrt(kappa)
        case _:
            return 1.0


def capped_learning_rate_ratio(
    *, batch_size: int, base_batch_size: int, rule: str | None, noise_scale: float | None
) -> float:
    """Gives the factor that a rule applies to the learning rate, no further than the noise scale.

    A batch far above B_noise averages away what is no longer there: its best learning rate is
    that of B_noise (McCandlish et al. 2018, arXiv:1812.06162, equation 2.6).

    Args:
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that the learning rate was chosen for, in examples.
        rule: `"linear"`, `"sqrt"` or `None`.
        noise_scale: B_noise or a lower bound of it, in examples; None where nothing is known of
            it, and the rule goes no further than `base_batch_size`.

    Returns:
        The factor of the rule at the batch size, for one above B_noise that at B_noise or at
        `base_batch_size`, whichever is larger.

    Raises:
        ValueError: If the rule is unknown or a batch size not positive.
    """
    reached = max(base_batch_size, round(noise_scale or 0))
    return learning_rate_ratio(
        batch_size=min(batch_size, reached), base_batch_size=base_batch_size, rule=rule
    )


def batch_size_ratio(*, batch_size: int, base_batch_size: int) -> float:
    """Gives kappa, the batch size over the base batch size.

    Args:
        batch_size: In examples.
        base_batch_size: In examples.

    Raises:
        ValueError: If one of them is not positive.
    """
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            "`batch_size` and `base_batch_size` must be positive. "
            f"Received: batch_size={batch_size}, base_batch_size={base_batch_size}."
        )
    return batch_size / base_batch_size


def check_rule(rule: str | None, name: str) -> str | None:
    """Checks that a learning-rate rule exists.

    Args:
        rule: The rule, or None.
        name: Name of the argument, for the message.

    Returns:
        The rule.

    Raises:
        ValueError: If it does not.
    """
    if rule is not None and rule not in RULES:
        raise ValueError(
            f"`{name}` must be None, 'linear' (for SGD), 'sqrt' (for Adam and its relatives) or "
            f"'noise' (for both, by the gradient noise scale). Received: {name}={rule!r}."
        )
    return rule


def _check_noise_scale(noise_scale: float | None) -> float:
    if noise_scale is None or not 0 <= noise_scale < math.inf:
        raise ValueError(
            "The rule 'noise' needs `noise_scale`, finite and not negative: measure it with "
            "`gradient_noise_scale`, or take another rule where it is unresolved. "
            f"Received: noise_scale={noise_scale}."
        )
    return noise_scale
