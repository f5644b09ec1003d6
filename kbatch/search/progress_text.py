"""The words in which the progress of a search is shown."""

from collections.abc import Mapping
from typing import Any

from kbatch.document.number_text import percent
from kbatch.search.fit_reporter import FitProgress
from kbatch.study.outcomes import outcome
from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import value_text


def trial_name(values: Mapping[str, Any], number: int | None, total: int | None) -> str:
    """Names a trial.

    Args:
        values: Its hyperparameters.
        number: Its place in the search, from 1, if it is known.
        total: Trials of the search.
    """
    place = "trial" if number is None else f"trial {number}/{total}"
    others = [
        f"{name} {value_text(value)}" for name, value in values.items() if name != "batch_size"
    ]
    return ", ".join([place, f"batch {values['batch_size']:>5}", *others])


def live_figures(
    progress: FitProgress, *, trial_left_s: float | None, search_left_s: float | None
) -> str:
    """Words how far a trial is: time left, throughput, memory and the last metrics."""
    figures = [percent(progress.share)]
    if trial_left_s is not None:
        figures.append(f"{duration(trial_left_s)} left")
    if search_left_s is not None:
        figures.append(f"search {duration(search_left_s)} left")
    return ", ".join(
        [
            *figures,
            *_speed(progress.samples_per_second, progress.memory_bytes),
            *_metrics(progress.metrics),
        ]
    )


def epoch_line(name: str, progress: FitProgress) -> str:
    """Words an epoch that ended."""
    epoch = f"epoch {progress.epoch + 1}/{progress.epochs}"
    figures = _speed(progress.samples_per_second, progress.memory_bytes)
    return ", ".join([name, epoch, *figures, *_metrics(progress.metrics)])


def trial_line(
    name: str, record: TrialRecord | None, *, duration_s: float, memory_bytes: int | None
) -> str:
    """Words how a trial ended: its figures, or the cause of its failure."""
    begun = f"{name}, {duration_s:5.1f} s"
    if record is None:
        return f"{begun}, failed: nothing was recorded"
    if record.status != "completed":
        return f"{begun}, {outcome(record)}: {record.failure}"
    metrics = {
        name: f"{value:.4f}" + _half_width(record, name)
        for name, value in _shown(record.metrics).items()
    }
    figures = _speed(record.samples_per_second, memory_bytes)
    count = len(record.executions)
    which = "best epoch" if count == 1 else f"best epochs, mean of {count} executions"
    return ", ".join([begun, *figures, *(f"{n} {v}" for n, v in metrics.items())]) + f" ({which})"


def duration(seconds: float) -> str:
    """Words a duration as minutes and seconds, or hours with them.

    Args:
        seconds: The duration; a negative one, of what takes longer than thought, is shown as 0.
    """
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _half_width(record: TrialRecord, name: str) -> str:
    interval = record.metric_interval(name)
    return f" ± {(interval.high - interval.low) / 2:.2g}" if interval else ""


def _speed(samples_per_second: float | None, memory_bytes: int | None) -> list[str]:
    memory = [] if memory_bytes is None else [f"{memory_bytes / 1e6:,.0f} MB"]
    if samples_per_second is None:
        return memory
    return [*memory, f"{samples_per_second:,.0f} samples/s"]


def _metrics(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in _shown(metrics).items()]


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Gives the metrics of the validation, or without one those of training."""
    validation = {n: v for n, v in metrics.items() if n.startswith("val_")}
    own = ("samples_per_second", "gradient_variance", "gradient_squared_norm", "learning_rate")
    return validation or {n: v for n, v in metrics.items() if n not in own}
