"""How trials ended, in words."""

from kbatch.study.trial import TrialRecord

STATUS_WORDS = {
    "completed": "completed",
    "out_of_memory": "out of memory",
    "failed": "failed",
    "running": "running",
    "interrupted": "interrupted",
}


def outcome(trial: TrialRecord) -> str:
    """Words how a trial ended: its status, or that the training diverged."""
    return "diverged" if diverged(trial) else STATUS_WORDS[trial.status]


def diverged(trial: TrialRecord) -> bool:
    """Whether a trial failed because its loss did not stay finite."""
    return trial.status == "failed" and any(e.diverged for e in trial.executions)
