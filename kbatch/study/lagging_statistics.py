"""What a reader must know where BatchNormalization's moving statistics lag behind training."""

from collections.abc import Iterator
from typing import NamedTuple

from kbatch.document.number_text import counted, readable
from kbatch.records.execution import ExecutionRecord
from kbatch.study.caveat import Caveat, concerned
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord

# Validation so far below training is more than a model usually fits its training data too well.
_FAR_BELOW = 0.1
# Before so many averaging times an average still holds some of what it began with: exp(-5) = 0.7 %.
_AVERAGING_TIMES = 5


class _Lag(NamedTuple):
    below: float
    training: float
    validation: float
    updates: int
    memory: float


def lagging_caveats(study: Study) -> Iterator[Caveat]:
    """List the trials whose validation accuracy shows lagging statistics, not their training."""
    found = concerned(study.trials, lambda trial: _lag_of(trial) is not None)
    if found is None:
        return
    lags = [(lag, trial) for trial in study.trials if (lag := _lag_of(trial)) is not None]
    most, trial = max(lags, key=lambda pair: pair[0].below)
    where = f" at {trial.batch_size:,}" if len(lags) > 1 else ""
    yield Caveat(
        "lagging statistics",
        f"Training accuracy is far above validation accuracy at {found.sizes} "
        f"({readable(most.training)} and {readable(most.validation)}{where}), and "
        f"BatchNormalization's moving statistics lag: {counted(most.updates, 'update')} came, and "
        f"the statistics average over the last {readable(most.memory)}, 1 / (1 - momentum). Before "
        "you compare these sizes, train for more updates or lower the momentum of the layers.",
        ("quality",),
        found.trial_ids,
    )


def _lag_of(trial: TrialRecord) -> _Lag | None:
    lags = [lag for e in trial.executions if (lag := _lag(e)) is not None]
    return max(lags, default=None)


def _lag(execution: ExecutionRecord) -> _Lag | None:
    momenta = execution.scaling.batch_norm_momenta if execution.scaling else None
    slowest = max(momenta or (0.0,))
    updates = execution.updates
    if not (execution.epochs and updates and 0 < slowest < 1):
        return None
    memory = 1 / (1 - slowest)
    last = execution.epochs[-1]
    pairs = [
        (training, validation)
        for name in last.metrics
        if "acc" in name
        and (training := last.finite(name)) is not None
        and (validation := last.finite(f"val_{name}")) is not None
    ]
    if not pairs or updates >= _AVERAGING_TIMES * memory:
        return None
    training, validation = max(pairs, key=lambda pair: pair[0] - pair[1])
    below = training - validation
    return _Lag(below, training, validation, updates, memory) if below > _FAR_BELOW else None
