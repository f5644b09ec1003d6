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

Then the same for means by epoch that resemble their neighbours: AR(1) noise of 20 % on tr(Sigma)
and of 10 % on |G|^2. `alone` is the share covered where each epoch counts as independent of the
others, `covered` what `noise_scale_of_runs` gives, and `width` how much wider its interval is.
"""

import argparse
import itertools

import numpy as np
from quick import parse_arguments

from kbatch.analysis import Estimate, gradient_noise_scale
from kbatch.analysis.intervals import ratio_of_means
from kbatch.analysis.noise_scale import noise_scale_of_runs

RATIOS = (0.1, 0.3, 1, 3, 10, 30, 100)
CORRELATIONS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
CURVATURE = np.geomspace(1.0, 0.1, 12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, metavar="EXAMPLES")
    options = parse_arguments(parser, repetitions=50)
    rng = np.random.default_rng(0)
    print(f"{'K':>3}{'steps':>7}{'ratio':>7}{'resolved':>10}{'covered':>9}{'wrong':>7}{'bound':>7}")
    for micros, steps, ratio in itertools.product((2, 4, 8), (30, 100, 400), RATIOS):
        truth = ratio * options.batch
        found = [
            one_run(rng, truth, options.batch, micros, steps) for _ in range(options.repetitions)
        ]
        print(f"{micros:>3}{steps:>7}{ratio:>7g}" + shares(found, truth))
    print(f"\n{'epochs':>6}{'rho':>6}{'alone':>8}{'covered':>9}{'width':>7}")
    for epochs, rho in itertools.product((5, 10, 20, 50), CORRELATIONS):
        print(f"{epochs:>6}{rho:>6g}" + coverage_of_epochs(rng, epochs, rho, options.repetitions))


def one_run(
    rng: np.random.Generator, noise_scale: float, batch_size: int, micros: int, steps: int
) -> Estimate:
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


def coverage_of_epochs(rng: np.random.Generator, late: int, rho: float, repetitions: int) -> str:
    """Runs of twice as many epochs, of which the late half counts; the true scale is 100."""
    alone = covered = 0
    widths = []
    for _ in range(repetitions):
        variances = 100 * (1 + 0.2 * autoregressive(rng, 2 * late, rho))
        norms = 1 + 0.1 * autoregressive(rng, 2 * late, rho)
        before = ratio_of_means(variances[late:], norms[late:], weights=np.ones(late)).ends
        after = noise_scale_of_runs([(variances, norms, 1.0)]).ends
        alone += before is not None and before[0] <= 100 <= before[1]
        covered += after is not None and after[0] <= 100 <= after[1]
        if before and after:
            widths.append((after[1] - after[0]) / (before[1] - before[0]))
    return f"{alone / repetitions:>8.1%}{covered / repetitions:>9.1%}{np.median(widths):>7.2f}"


def autoregressive(rng: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """AR(1) noise of standard deviation 1."""
    values = rng.standard_normal(count)
    for i in range(1, count):
        values[i] = rho * values[i - 1] + np.sqrt(1 - rho**2) * values[i]
    return values


def shares(found: list[Estimate], truth: float) -> str:
    intervals = [scale.ends for scale in found if scale.ends is not None]
    covered = sum(low <= truth <= high for low, high in intervals)
    bound = sum(scale.low is None or scale.low <= truth for scale in found)
    return (
        f"{len(intervals) / len(found):>10.1%}"
        + (f"{covered / len(intervals):>9.1%}" if intervals else f"{'-':>9}")
        + f"{(len(intervals) - covered) / len(found):>7.1%}{bound / len(found):>7.1%}"
    )


if __name__ == "__main__":
    main()
