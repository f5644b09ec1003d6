"""The settings of a trial that follow its batch size, its learning rate by a rule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.records.json_codec import RecordError, read_record
from kbatch.records.notes import RunNote
from kbatch.study.loading import RECORD_NAME
from kbatch.study.trial import TrialRecord
from kbatch.training.learning_rate import forget_scaling, scale_model, scaling_of


class TrialLearningRate:
    """Scales the settings of a model when it is built, or, by the noise scale, when it trains.

    The rule "noise" waits for the trial of the base batch size, whose records lie in the project.

    Args:
        rule: `"linear"`, `"sqrt"`, `"noise"` or None.
        base_batch_size: Batch size that the model's settings suit, in examples.
        follow_batch_size: Which settings follow the batch size besides the learning rate.
    """

    def __init__(
        self, rule: str | None, base_batch_size: int, *, follow_batch_size: tuple[str, ...]
    ):
        self._rule = rule
        self._base_batch_size = base_batch_size
        self._follow_batch_size = follow_batch_size

    def at_build(self, model: keras.Model, batch_size: int) -> None:
        """Apply a rule that needs nothing but the sizes."""
        if self._rule != "noise" or batch_size == self._base_batch_size:
            self._scale(model, batch_size)
        else:
            forget_scaling(model)  # That of an earlier trial, where it is built around again.

    def at_fit(
        self, model: keras.Model, values: Mapping[str, Any], *, project: Path | None
    ) -> RunNote | None:
        """Apply the rule that waits for the trial of the base size; says what it used."""
        if scaling_of(model) is not None:
            return None
        found = base_noise_scale(project, self._base_batch_size, values=values)
        self._scale(model, values["batch_size"], found.value)
        return found.note

    def _scale(self, model: keras.Model, batch_size: int, noise_scale: float | None = None) -> None:
        scale_model(
            model,
            batch_size=batch_size,
            base_batch_size=self._base_batch_size,
            rule=self._rule,
            follow_batch_size=self._follow_batch_size,
            noise_scale=noise_scale,
        )


class BaseNoiseScale(NamedTuple):
    """A noise scale that was measured in an earlier trial.

    Attributes:
        value: In examples.
        note: Which trial it is from, and how sure it is.
    """

    value: float
    note: RunNote


def base_noise_scale(
    project: Path | None, base_batch_size: int, *, values: Mapping[str, Any]
) -> BaseNoiseScale:
    """Find the noise scale of the trial of the base batch size that ended before."""
    base = dict(values) | {"batch_size": base_batch_size}
    trials = [] if project is None else _completed(project)
    same = [trial for trial in trials if _own(trial.hyperparameters) == _own(base)]
    measured = [(t, scale) for t in same if (scale := t.noise_scale) is not None]
    for trial, scale in measured:
        if (found := _usable(trial, scale)) is not None:
            return found
    found = "its noise scale is not known" if same else "there is none"
    raise keras_tuner.errors.FailedTrialError(
        '`learning_rate_scaling="noise"` uses the noise scale of a completed trial of '
        "`base_batch_size` with the same other hyperparameters, which must come first, as it does "
        "in a grid: train it for more epochs where its noise scale is unresolved, or take "
        f'"linear" or "sqrt". Received: base_batch_size={base_batch_size}, {found}.'
    )


def _usable(trial: TrialRecord, scale: NoiseScale) -> BaseNoiseScale | None:
    known: dict[str, Any] = {"trial_id": trial.trial_id, "batch_size": trial.batch_size}
    if scale.value is not None and scale.interval is not None:
        known |= {"value": scale.value, "low": scale.interval.low, "high": scale.interval.high}
        return BaseNoiseScale(scale.value, RunNote.of("noise_rule", **known))
    if not scale.at_least:
        return None
    return BaseNoiseScale(scale.at_least, RunNote.of("noise_rule", low=scale.at_least, **known))


def _completed(project: Path) -> list[TrialRecord]:
    found = []
    for file in sorted(project.glob(f"trial_*/{RECORD_NAME}")):
        try:
            record = read_record(TrialRecord, file)
        except RecordError:
            continue  # Loading the study names it.
        if record.status == "completed":
            found.append(record)
    return found


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what Hyperband keeps among the hyperparameters."""
    return {name: value for name, value in values.items() if not name.startswith("tuner/")}
