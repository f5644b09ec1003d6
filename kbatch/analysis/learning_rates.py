"""Learning-rate rules: how the learning rate follows the batch size.

With kappa = batch_size / base_batch_size:

    linear    lr' = kappa lr          SGD; Goyal et al. (2017), arXiv:1706.02677, section 2.1
    sqrt      lr' = sqrt(kappa) lr    Adam-like; Malladi et al. (2022), arXiv:2205.10287, sec. 5
"""

import math

RULES = ("linear", "sqrt")


def scale_learning_rate(
    learning_rate: float, *, batch_size: int, base_batch_size: int, rule: str | None
) -> float:
    """Scales a learning rate from one batch size to another.

    Example:

    >>> scale_learning_rate(0.1, batch_size=256, base_batch_size=64, rule="linear")
    0.4

    Args:
        learning_rate: Learning rate that suits `base_batch_size`.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that `learning_rate` was chosen for, in examples.
        rule: `"linear"` (SGD), `"sqrt"` (Adam-like) or `None` (left as it is).

    Returns:
        The scaled learning rate.

    Raises:
        ValueError: If the rule is unknown or a batch size is not positive.
    """
    return learning_rate * learning_rate_ratio(
        batch_size=batch_size, base_batch_size=base_batch_size, rule=rule
    )


def learning_rate_ratio(*, batch_size: int, base_batch_size: int, rule: str | None) -> float:
    """Gives the factor that a rule applies to the learning rate.

    Args:
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that the learning rate was chosen for, in examples.
        rule: `"linear"`, `"sqrt"` or `None`.

    Returns:
        kappa, its square root, or 1.

    Raises:
        ValueError: If the rule is unknown or a batch size is not positive.
    """
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            "`batch_size` and `base_batch_size` must be positive. "
            f"Received: batch_size={batch_size}, base_batch_size={base_batch_size}."
        )
    kappa = batch_size / base_batch_size
    match check_rule(rule, "rule"):
        case "linear":
            return kappa
        case "sqrt":
            return math.sqrt(kappa)
        case _:
            return 1.0


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
            f"`{name}` must be None, 'linear' (for SGD) or 'sqrt' (for Adam and its relatives). "
            f"Received: {name}={rule!r}."
        )
    return rule
