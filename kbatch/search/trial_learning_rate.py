"""The settings of a trial that follow its batch size, its learning rate by a rule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kbatch.search.base_noise_scale import base_noise_scale
from kbatch.training.scaled_model import forget_scaling, scale_model, scaling_of


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
        """Applies a rule that needs nothing but the sizes.

        Args:
            model: A compiled model, which is changed.
            batch_size: Batch size of the trial, in examples.
        """
        if self._rule != "noise" or batch_size == self._base_batch_size:
            self._scale(model, batch_size)
        else:
            forget_scaling(model)  # That of an earlier trial, where it is built around again.

    def at_fit(
        self, model: keras.Model, values: Mapping[str, Any], *, project: Path | None
    ) -> str | None:
        """Applies the rule that waits for the trial of the base size; says what it used.

        Args:
            model: The model, which is changed unless its learning rate was scaled before.
            values: Hyperparameters of the trial.
            project: The project directory, None outside of a search.

        Raises:
            FailedTrialError: If that trial does not tell the noise scale.
        """
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
