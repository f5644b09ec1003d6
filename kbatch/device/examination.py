"""The record of what was found on a machine that is to train."""

import dataclasses
import statistics

from kbatch.records.environment import EnvironmentRecord

STATUSES = ("ok", "warning", "missing")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: What it is, such as `"keras-tuner"` or `"memory"`.
        status: `"ok"`, `"warning"` where results or speed may suffer, `"missing"` where something
            that is needed is not there.
        text: What was found, in one line.
        command: The command that mends it, None where there is nothing to mend or no command
            does.
    """

    topic: str
    status: str
    text: str
    command: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(
                f"`status` must be one of {', '.join(STATUSES)}. Received: status={self.status!r}."
            )


@dataclasses.dataclass(frozen=True)
class PolicySpeed:
    """How long a train step takes under a dtype policy.

    Attributes:
        dtype_policy: Name of the policy.
        step_times_s: Seconds a step, one value a round; of a policy that is very slow one in all.
    """

    dtype_policy: str
    step_times_s: tuple[float, ...]

    def times_as_fast_as(self, other: "PolicySpeed") -> float:
        """Return the median over common rounds of the other policy's step time over this one's."""
        pairs = zip(other.step_times_s, self.step_times_s, strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclasses.dataclass(frozen=True)
class Examination:
    """What `kbatch doctor` found.

    Attributes:
        findings: Everything that was looked at.
        policy_speeds: Train steps that were timed, none where they could not be.
        environment: The machine and the software, None where TensorFlow could not be started.
    """

    findings: tuple[Finding, ...]
    policy_speeds: tuple[PolicySpeed, ...]
    environment: EnvironmentRecord | None

    @property
    def complete(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(finding.status != "missing" for finding in self.findings)
