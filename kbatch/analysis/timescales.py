"""Timescales that stay in examples: what follows the batch size besides the learning rate.

With kappa = batch_size / base_batch_size and rho the factor of the learning rate:

    beta2'  = beta2 ** kappa         half-life of Adam's second moment, in examples
                                     (Marek et al. 2025, arXiv:2507.07101)
    lambda' = lambda kappa / rho     tau = B / (eta lambda D), the passes over the data that the
                                     weights average over (Bergsma et al. 2025, arXiv:2505.13738;
                                     Wang and Aitchison 2024, arXiv:2405.13698)
    m'      = m ** kappa             half-life of BatchNormalization's moving statistics, in
                                     examples (Busbridge et al. 2023, arXiv:2307.13813, def. 1.2)

They hold whether or not the learning rate follows the batch size: without a rule rho is 1, and the
decay per example, eta lambda / B, stays as well.
"""

from collections.abc import Iterable

from kbatch.analysis.learning_rates import batch_size_ratio

FOLLOWERS = ("beta_2", "weight_decay", "batch_norm_momentum")


def scale_beta_2(beta_2: float, *, batch_size: int, base_batch_size: int) -> float:
    """Scales the decay of Adam's second moment so that its half-life in examples stays.

    Example:

    >>> scale_beta_2(0.99, batch_size=128, base_batch_size=64)
    0.9801

    Args:
        beta_2: Decay a step that suits `base_batch_size`.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that `beta_2` was chosen for, in examples.

    Returns:
        beta_2 to the power of kappa.

    Raises:
        ValueError: If `beta_2` is not in [0, 1) or a batch size is not positive.
    """
    if not 0 <= beta_2 < 1:
        raise ValueError(f"`beta_2` must lie in [0, 1). Received: beta_2={beta_2}.")
    return beta_2 ** batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)


def scale_weight_decay(
    weight_decay: float, *, batch_size: int, base_batch_size: int, learning_rate_ratio: float
) -> float:
    """Scales a decoupled weight decay so that its timescale in examples stays.

    An update takes the share eta lambda of a weight away, as in Keras's AdamW. To first order in
    that share the decay over a pass through the data is then the same at every batch size.

    Example:

    >>> scale_weight_decay(0.004, batch_size=256, base_batch_size=64, learning_rate_ratio=2.0)
    0.008

    Args:
        weight_decay: lambda that suits `base_batch_size`.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that `weight_decay` was chosen for, in examples.
        learning_rate_ratio: Factor of the learning rate between the two.

    Returns:
        lambda times kappa over the factor of the learning rate.

    Raises:
        ValueError: If a batch size or the factor is not positive.
    """
    if not learning_rate_ratio > 0:
        raise ValueError(
            "`learning_rate_ratio` must be positive. "
            f"Received: learning_rate_ratio={learning_rate_ratio}."
        )
    kappa = batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)
    return weight_decay * kappa / learning_rate_ratio


def scale_batch_norm_momentum(momentum: float, *, batch_size: int, base_batch_size: int) -> float:
    """Scales BatchNormalization's momentum so that its half-life in examples stays.

    Example:

    >>> scale_batch_norm_momentum(0.99, batch_size=128, base_batch_size=64)
    0.9801

    Args:
        momentum: Share of the old moving statistics that an update keeps, at `base_batch_size`.
        batch_size: Batch size to scale to, in examples.
        base_batch_size: Batch size that `momentum` was chosen for, in examples.

    Returns:
        The momentum to the power of kappa.

    Raises:
        ValueError: If `momentum` is not in [0, 1] or a batch size is not positive.
    """
    if not 0 <= momentum <= 1:
        raise ValueError(f"`momentum` must lie in [0, 1]. Received: momentum={momentum}.")
    return momentum ** batch_size_ratio(batch_size=batch_size, base_batch_size=base_batch_size)


def check_followers(names: Iterable[str], name: str) -> tuple[str, ...]:
    """Checks which settings are to follow the batch size.

    Args:
        names: Some of `FOLLOWERS`, or none.
        name: Name of the argument, for the message.

    Returns:
        Each of them once, in the order of `FOLLOWERS`.

    Raises:
        TypeError: If it is a string, or no iterable.
        ValueError: If one of them is not known.
    """
    asked = None if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if asked is None or any(one not in FOLLOWERS for one in asked):
        kind = TypeError if asked is None else ValueError
        raise kind(
            f"`{name}` must be a tuple with some of 'beta_2', 'weight_decay' and "
            f"'batch_norm_momentum', or () for none. Received: {name}={names!r}."
        )
    return tuple(one for one in FOLLOWERS if one in asked)
