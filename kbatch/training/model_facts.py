"""How a model trains, as who built it left it."""

from typing import Any

from kbatch.training.accumulation import accumulation_by_user
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.model import replica_count, user_step


class ModelFacts:
    """What decides how a search trains a model, read once when it is built."""

    def __init__(self, model: Any):
        self.replicas: int = replica_count(model)
        self.dtype_policy: str = model.dtype_policy.name
        self.loss_scaled: bool = loss_scaled(model)
        self.own_step: bool = user_step(model) is not None
        self.cut_by_user = accumulation_by_user(model)

    def rows(self, batch_size: int) -> int:
        """Return the examples that each replica has of a batch, at most."""
        return -(-batch_size // self.replicas)
