"""How often does the interval of the gradient noise scale hold the true scale?

python benchmarks/noise_scale_coverage.py [--repetitions 2000] [--batch 64]

Updates of a quadratic whose tr(Sigma) and |G|^2 are known, split into K micro-batches. For each
K, number of steps and ratio of the true scale to the batch, four shares in percent:

    resolved   runs in which |G|^2 was told from 0, so that a scale is reported
    covered    of those, runs whose 95 % interval holds the true scale
    wrong      of all runs, those that report an interval without it
    bound      of all runs, those whose lower bound (nominal 97.5 %) holds or that give none

Where few runs are resolved, those few are the ones that overestimate |G|^2 by chance: `covered`
is then low, while `wrong` keeps to its 5 %. The others report a lower bound alone.
"""

import argparse
import itertools

import numpy as np

from kbatch.analysis import NoiseScale, gradient_noise_scale

RATIOS = (0.1, 0.3, 1, 3, 10, 30, 100)
CURVATURE = np.geomspace(1.0, 0.1, 12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, metavar="EXAMPLES")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"{'K':>3}{'steps':>7}{'ratio':>7}{'resolved':>10}{'covered':>9}{'wrong':>7}{'bound':>7}")
    for micros, steps, ratio in itertools.product((2, 4, 8), (30, 100, 400), RATIOS):
        truth = ratio * options.batch
        found = [
            one_run(rng, truth, options.batch, micros, steps) for _ in range(options.repetitions)
        ]
        print(f"{micros:>3}{steps:>7}{ratio:>7g}" + shares(found, truth))


def one_run(
    rng: np.random.Generator, noise_scale: float, batch_size: int, micros: int, steps: int
) -> NoiseScale:
    """The scale from updates at one point of a quadratic, where |G|^2 = 1."""
    gradient = CURVATURE / np.linalg.norm(CURVATURE)
    deviation = gradient * np.sqrt(noise_scale * micros / batch_size)
    micro = gradient + deviation * rng.standard_normal((steps, micros, len(gradient)))
    return gradient_noise_scale(
        np.mean(np.sum(micro**2, axis=2), axis=1),
        np.sum(np.mean(micro, axis=1) ** 2, axis=1),
        batch_size=batch_size,
        accumulation_steps=micros,
    )


def shares(found: list[NoiseScale], truth: float) -> str:
    intervals = [scale.interval for scale in found if scale.interval is not None]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals)
    bound = sum(scale.at_least is None or scale.at_least <= truth for scale in found)
    return (
        f"{len(intervals) / len(found):>10.1%}"
        + (f"{covered / len(intervals):>9.1%}" if intervals else f"{'-':>9}")
        + f"{(len(intervals) - covered) / len(found):>7.1%}{bound / len(found):>7.1%}"
    )


if __name__ == "__main__":
    main()
