"""How a model trains: read when it is built, and set as a trial trained."""

from typing import Any

from kbatch.records.training_run import ExecutionRecord
from kbatch.training.accumulation import Accumulation, accumulation_by_user, sum_sparse_gradients
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.learning_rate import set_scaling
from kbatch.training.model import check_compiled, replica_count, uninstall_step, user_step


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


def apply_settings(model: Any, run: ExecutionRecord) -> Any:
    """Make a compiled model train as that of an execution did, by its values: twice is as once."""
    check_compiled(model)
    if model.dtype_policy.name != run.dtype_policy:
        raise ValueError(
            "The model must have the dtype policy of the trials: call "
            f'`keras.config.set_dtype_policy("{run.dtype_policy}")` before you build it. '
            f"Received: a model under {model.dtype_policy.name}."
        )
    if run.scaling is not None:
        set_scaling(model, run.scaling)
    # What the build function cuts, and a step of the user's own, trained as it is.
    if user_step(model) is None and accumulation_by_user(model) is None:
        size = run.micro_batch_size
        if size is not None and size < run.replica_batch_size:
            Accumulation(size).apply(model)
        else:
            uninstall_step(model)
            sum_sparse_gradients(model)
    if run.steps_per_execution is not None:
        model.steps_per_execution = run.steps_per_execution
    # What was traced before has the former values in it.
    model.train_function = model.test_function = model.predict_function = None
    return model
