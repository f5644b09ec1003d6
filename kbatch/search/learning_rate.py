"""The settings of a trial that follow its batch size, its learning rate by a rule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.records.notes import RunNote
from kbatch.search.trial_files import readable_trials
from kbatch.training.learning_rate import forget_scaling, scale_model, scaling_of


class TrialLearningRate(NamedTuple):
    """Scales the settings of a model when it is built, or, by the noise scale, when it trains.

    The rule "noise" waits for the trial of the base batch size, whose records lie in the project.

    Attributes:
        rule: `"linear"`, `"sqrt"`, `"noise"` or None.
        base_batch_size: Batch size that the model's settings suit, in examples.
        follow_batch_size: Which settings follow the batch size besides the learning rate.
    """

    rule: str | None
    base_batch_size: int
    follow_batch_size: tuple[str, ...]

    def at_build(self, model: keras.Model, batch_size: int) -> None:
        """Apply a rule that needs nothing but the sizes."""
        if self.rule != "noise" or batch_size == self.base_batch_size:
            self._scale(model, batch_size)
        else:
            forget_scaling(model)  # That of an earlier trial, where it is built around again.

    def at_fit(
        self, model: keras.Model, values: Mapping[str, Any], *, project: Path | None
    ) -> tuple[RunNote, ...]:
        """Apply the rule that waits for the trial of the base size; says what it used."""
        if scaling_of(model) is not None:
            return ()
        noise_scale, note = _base_noise_scale(
            project, {**values, "batch_size": self.base_batch_size}
        )
        self._scale(model, values["batch_size"], noise_scale)
        return (note,)

    def _scale(self, model: keras.Model, batch_size: int, noise_scale: float | None = None) -> None:
        scale_model(
            model,
            batch_size=batch_size,
            base_batch_size=self.base_batch_size,
            rule=self.rule,
            follow_batch_size=self.follow_batch_size,
            noise_scale=noise_scale,
        )


def _base_noise_scale(project: Path | None, base: Mapping[str, Any]) -> tuple[float, RunNote]:
    """Find the noise scale of the trial of the base batch size, in examples, and say how sure."""
    trials = [] if project is None else readable_trials(project)
    same = [
        trial
        for trial in trials
        if trial.status == "completed" and _own(trial.hyperparameters) == _own(base)
    ]
    for trial in same:
        scale = trial.noise_scale
        if scale is None:
            continue
        known: dict[str, Any] = {"trial_id": trial.trial_id, "batch_size": trial.batch_size}
        if scale.value is not None and scale.interval is not None:
            known |= {"value": scale.value, "low": scale.interval.low, "high": scale.interval.high}
            return scale.value, RunNote.of("noise_rule", **known)
        if scale.at_least:
            return scale.at_least, RunNote.of("noise_rule", low=scale.at_least, **known)
    found = "its noise scale is not known" if same else "there is none"
    raise keras_tuner.errors.FailedTrialError(
        '`learning_rate_scaling="noise"` uses the noise scale of a completed trial of '
        "`base_batch_size` with the same other hyperparameters, which must come first, as it does "
        "in a grid: train it for more epochs where its noise scale is unresolved, or take "
        f'"linear" or "sqrt". Received: base_batch_size={base["batch_size"]}, {found}.'
    )


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what Hyperband keeps among the hyperparameters."""
    return {name: value for name, value in values.items() if not name.startswith("tuner/")}
