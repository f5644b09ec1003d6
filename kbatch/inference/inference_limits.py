"""What fresh calls for one latency target say of others."""

from collections.abc import Sequence

from kbatch.inference.record import TargetCheck


def least_by_checks(checks: Sequence[TargetCheck], latency_ms: float, quantile: float) -> int:
    """Gives the largest size that kept to a target as strict or stricter, 0 where none did.

    Args:
        checks: Checks of one call path and policy.
        latency_ms: The target that is asked for, in milliseconds.
        quantile: Share of the calls that keep to it.
    """
    stricter = [c for c in checks if c.latency_ms <= latency_ms and c.quantile >= quantile]
    return max((c.batch_size for c in stricter if c.verified), default=0)


def most_by_checks(checks: Sequence[TargetCheck], latency_ms: float, quantile: float) -> int | None:
    """Gives the largest size that checks leave for a target, None where they say nothing of it.

    A stricter target has no larger size than the one that was found for a looser one, and none
    from the smallest size on that missed it. One that lacks calls for a verification says nothing.

    Args:
        checks: Checks of one call path and policy.
        latency_ms: The target that is asked for, in milliseconds.
        quantile: Share of the calls that keep to it.
    """
    looser = [c for c in checks if c.latency_ms >= latency_ms and c.quantile <= quantile]
    found = [c.batch_size for c in looser if c.best]
    missed = [
        c.batch_size - 1
        for c in looser
        if not c.best and not c.verified and c.missing_calls is None
    ]
    return min([*found, *missed], default=None)
