"""A study: the trials of one search."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbatch.records.environment import EnvironmentRecord
from kbatch.records.json_files import write_record
from kbatch.records.shown_record import ShownRecord
from kbatch.study.goodput import GoodputRecord
from kbatch.study.study_table import execution_rows, trial_rows
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class SearchRecord:
    """What holds for all trials of a search.

    Attributes:
        settings: Arguments of the hypermodel, by name.
        environment: Machine and software.
    """

    settings: Mapping[str, object]
    environment: EnvironmentRecord

    def difference(self, settings: Mapping[str, object]) -> str | None:
        """Return how other settings differ, None if they do not; more batch sizes extend these."""
        known = [name for name in settings if name in self.settings]
        names = [name for name in known if not self._goes_on(name, settings[name])]
        listed = [f"{n}: {self.settings[n]} there, {settings[n]} here" for n in names]
        return "; ".join(listed) or None

    def _goes_on(self, name: str, value: Any) -> bool:
        known: Any = self.settings[name]
        if name == "batch_sizes":
            return set(known) <= set(value)
        return known == value


@dataclasses.dataclass(frozen=True)
class Study(ShownRecord):
    """The trials of one search, read from files or from a tuner.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> study.to_dataframe().sort_values("val_accuracy")

    Attributes:
        name: Name of the search, the folder's name.
        trials: The trials by batch size, then trial id.
        search: What holds for all of them, None if its file is missing.
        problems: What is missing, a line each: files that could not be read, and trials that failed
            before training, in building the model.
        goodput: What a search by goodput measured and decided, None for another strategy.
    """

    name: str
    trials: tuple[TrialRecord, ...]
    search: SearchRecord | None = None
    problems: tuple[str, ...] = ()
    goodput: GoodputRecord | None = None

    def __post_init__(self):
        counts = Counter(trial.trial_id for trial in self.trials)
        repeated = [trial_id for trial_id, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(
                f"Trials must have ids of their own. Received more than once: {repeated}."
            )

    def __repr__(self) -> str:
        """Sums the study up in a line: its records would fill pages."""
        completed = sum(trial.status == "completed" for trial in self.trials)
        parts = [f"{len(self.trials)} trials, {completed} completed"]
        if self.trials:
            sizes = [trial.batch_size for trial in self.trials]
            parts.append(f"batch sizes {min(sizes)} to {max(sizes)}")
        best = self.best_trial()
        if best is not None:
            value = f"{best.objective.name} {best.objective_value:.4g}"
            parts.append(f"best {value} at batch size {best.batch_size}")
        return f"<Study {self.name!r}: {', '.join(parts)}>"

    @property
    def objective(self) -> Objective | None:
        """What the search optimised, None for an empty study."""
        return self.trials[0].objective if self.trials else None

    @property
    def quality_metric(self) -> Objective | None:
        """The metric that tells how well a model learned.

        It is the objective, or a validation accuracy or the validation loss where the search
        optimised throughput.
        """
        names = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        objective = self.objective
        if objective is None:
            return None
        if objective.name in names and not objective.name.startswith("samples_per_second"):
            return objective
        accuracies = [n for n in names if "acc" in n]
        ranked = sorted(accuracies, key=lambda n: not n.startswith("val_"))
        if ranked:
            return Objective(ranked[0], "max")
        losses = [n for n in ("val_loss", "loss") if n in names]
        return Objective(losses[0], "min") if losses else None

    def best_trial(self) -> TrialRecord | None:
        """Find the completed trial with the best mean objective; of equals the smaller batch size.

        It is the trial that the tuner names. None if no trial completed.
        """
        scored = [
            (t.objective.rank(value, batch_size=t.batch_size, trial_id=t.trial_id), t)
            for t in self.trials
            if t.status == "completed" and (value := t.objective_value) is not None
        ]
        return min(scored, key=lambda pair: pair[0])[1] if scored else None

    def to_dataframe(self, *, executions: bool = False) -> "pd.DataFrame":
        """Makes a table of the trials.

        The columns are `trial_id`, `status`, `batch_size`, `micro_batch_size`,
        `accumulation_steps`, `batch_size_seen`, `dtype_policy`, `optimizer`,
        `learning_rate`, `samples_per_second` with `samples_per_second_low` and `_high`
        (a 95 % interval over three executions or more, quartiles over the windows of a single one),
        `window_samples_per_second` (the median over timing windows), `first_step_s`,
        `data_wait_share`, `train_s`, `total_s`, `examples_seen`, `updates`,
        `seconds_to_target`, `updates_to_target`, `examples_to_target`, `noise_scale` of the late
        half of training in examples, with `noise_scale_low` and `_high` (a 95 % interval; an
        unresolved one may have the lower bound alone), `joules_to_target`, `joules_per_sample`,
        `gpu_energy_j`, `gpu_power_w` and `gpu_utilization` (0 to 1) of all GPUs in use,
        `cpu_cores_busy`, `resident_bytes`, `epochs`, `executions` (or `execution` and `seed`),
        `failure`, then the metrics of the best epoch under Keras's names, then the other
        hyperparameters (as `hp/name` where a name is taken). Missing is NaN or None.

        Args:
            executions: One row an execution instead of one a trial.

        Returns:
            The table, in the order of `trials`.
        """
        import pandas as pd

        rows = execution_rows(self.trials) if executions else trial_rows(self.trials)
        return pd.DataFrame(rows)

    def save(self, path: str | Path) -> None:
        """Writes the whole study to one JSON file that `load_study` reads.

        Args:
            path: File to write, with suffix `.json`.

        Raises:
            ValueError: If the suffix is another one.
            OSError: If it cannot be written.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise ValueError(f"`path` must end in `.json`. Received: path={str(path)!r}.")
        write_record(self, path)
