"""A whole search goes on in float32 where its model cannot train under its dtype policy."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbatch.records.notes import RunNote
from kbatch.search.trial_files import readable_trials
from kbatch.training.dtype_policy import PolicyUnsupported


class Float32Fallback:
    """Decides for all trials of a search: sizes under several policies cannot be compared.

    Args:
        policies: Names of the dtype policies of the search.
    """

    def __init__(self, policies: Sequence[str]):
        self._policies = policies
        self.note: RunNote | None = None  # Why all trials train in float32, if they do.

    def may_begin(self, project: Path | None) -> bool:
        """Return whether the whole search may go to float32: no trial has completed."""
        runs = [run for trial in readable_trials(project) for run in trial.executions]
        completed = any(run.status == "completed" for run in runs)
        return len(self._policies) == 1 and not self.note and not completed

    def run(
        self,
        project: Path | None,
        train: Callable[[], Any],
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> Any:
        """Run what trains, else in float32, where the search stays if that gets further."""
        try:
            return train()
        except PolicyUnsupported as error:
            if not self.may_begin(project):
                raise
            reached, (policy,) = progress(), self._policies
            self.note = RunNote.of("float32_instead", policy=policy, reason=str(error))
            warnings.warn(self.note, stacklevel=2)
            if project is None:  # The next model that is built trains in float32.
                raise
        try:
            return train()
        except BaseException:
            if progress() <= reached:
                self.note = None
            raise
