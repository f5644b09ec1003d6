"""The record of a comparison: a batch that goes through a model whole, and in parts."""

import dataclasses

# In float32 sums in another order differ by some 1e-6.
EQUAL_UP_TO = 1e-4


@dataclasses.dataclass(frozen=True)
class PartsCheck:
    """Whether the parts of a batch add up to the whole: its loss terms and its gradient.

    Attributes:
        difference: Largest difference of a loss term, over its size; where none of them differs,
            of a variable's gradient, over its norm. None where it could not be computed.
        where: The loss term or variable that differs most, None without a difference.
        reason: Why it could not be computed, else None.
        rows: Examples of each batch that was compared.
    """

    difference: float | None
    where: str | None
    reason: str | None
    rows: int

    def __post_init__(self):
        if (self.difference is None) == (self.reason is None):
            raise ValueError(
                "A check has a `difference`, or a `reason` why it has none. "
                f"Received: difference={self.difference}, reason={self.reason!r}."
            )

    @property
    def equal(self) -> bool:
        """Whether parts were seen to train as the whole does."""
        return self.difference is not None and self.difference <= EQUAL_UP_TO
