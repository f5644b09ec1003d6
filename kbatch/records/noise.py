"""The gradient noise scale in the epochs of training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kbatch.analysis.noise_scale import NoiseScale, noise_scale_of_runs

# Metrics of an epoch: means of tr(Sigma) and of |G|^2 over its measured updates.
MOMENT_METRICS = ("gradient_variance", "gradient_squared_norm")


class EpochNoiseScale(NamedTuple):
    """One point of the noise scale's curve.

    Attributes:
        epoch: Number of the epoch, from 0.
        value: The ratio of the epoch's mean moments, in examples; None where |G|^2 was lost in
            noise. It has no interval: the curve shows a trend, `noise_scale` a value.
    """

    epoch: int
    value: float | None


class _Epoch(Protocol):
    @property
    def epoch(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float | None]: ...
    @property
    def updates(self) -> int: ...


def noise_scale(runs: Sequence[Sequence[_Epoch]]) -> NoiseScale | None:
    """Estimates the gradient noise scale of the late half of each run, all together.

    Args:
        runs: The epochs of each run, in order.

    Returns:
        The noise scale, None where no epoch of any run has the moments.
    """
    measured = [epochs for run in runs if (epochs := _measured(run))]
    if not measured:
        return None
    return noise_scale_of_runs([_moments(epochs) for epochs in measured])


def noise_scale_curve(epochs: Sequence[_Epoch]) -> tuple[EpochNoiseScale, ...]:
    """Gives the noise scale of each epoch that has the moments."""
    return tuple(EpochNoiseScale(e.epoch, _ratio(*_pair(e))) for e in _measured(epochs))


def _ratio(variance: float, squared_norm: float) -> float | None:
    return max(variance, 0.0) / squared_norm if squared_norm > 0 else None


def _pair(epoch: _Epoch) -> list[float]:
    return [epoch.metrics[name] or 0.0 for name in MOMENT_METRICS]


def _measured(epochs: Sequence[_Epoch]) -> list[_Epoch]:
    return [e for e in epochs if all(e.metrics.get(n) is not None for n in MOMENT_METRICS)]


def _moments(epochs: Sequence[_Epoch]) -> tuple[list[float], list[float], list[int]]:
    variances, norms = ([_pair(e)[i] for e in epochs] for i in range(2))
    # Of an epoch's updates every n-th is measured, so they weigh as the measured ones do.
    return variances, norms, [max(1, e.updates) for e in epochs]
