"""The end of a trial that cannot be the best any more."""

from collections.abc import Sequence
from typing import Any

from kbatch.training.budgets import TimeBudget


def capped(callbacks: Sequence[Any], cap_s: float | None) -> list[Any]:
    """Lets training end after so many seconds, where no callback ends it sooner.

    Args:
        callbacks: The callbacks of a trial.
        cap_s: Seconds of training, None for no cap.
    """
    if cap_s is None:
        return list(callbacks)
    budgets = [c for c in callbacks if isinstance(c, TimeBudget)]
    sooner = [cap_s, *(c.budget.train_s for c in budgets if c.budget.train_s is not None)]
    return [*(c for c in callbacks if c not in budgets), TimeBudget(min(sooner))]
