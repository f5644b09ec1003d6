"""How often does the interval of the gradient noise scale contain the true scale?

python benchmarks/noise_scale_coverage.py [--repetitions 2000] [--batch 64]    1 minute
python benchmarks/noise_scale_coverage.py --epochs    the same for correlated epochs

Simulates updates of a quadratic with known tr(Sigma) and |G|^2, in K micro-batches. Each row is one
K, number of steps, and ratio of the true scale to the batch size. All shares are in percent.

resolved   runs in which |G|^2 is significantly above 0, so that a scale is reported
covered    resolved runs whose 95 % interval contains the true scale
wrong      all runs whose interval does not contain it
bound      all runs whose lower bound (nominal 97.5 %) holds, or that have none

If few runs are resolved, they are the runs that overestimate |G|^2 by chance. Then `covered` is
low, but `wrong` stays below 5 %. The other runs report only a lower bound.

With `--epochs`, the means of neighbouring epochs are correlated: AR(1) noise of 20 % on tr(Sigma)
and of 10 % on |G|^2. `alone` is the coverage if epochs are taken as independent, `covered` is the
coverage of `noise_scale_of_runs`, and `width` is how much wider its interval is.
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
    parser.add_argument("--epochs", action="store_true", help="means of correlated epochs")
    options = parse_arguments(parser, repetitions=50)
    rng = np.random.default_rng(0)
    if options.epochs:
        print(f"{'epochs':>6}{'rho':>6}{'alone':>8}{'covered':>9}{'width':>7}")
        for epochs, rho in itertools.product((5, 10, 20, 50), CORRELATIONS):
            coverage = coverage_of_epochs(rng, epochs, rho, options.repetitions)
            print(f"{epochs:>6}{rho:>6g}{coverage}", flush=True)
        return
    print(f"{'K':>3}{'steps':>7}{'ratio':>7}{'resolved':>10}{'covered':>9}{'wrong':>7}{'bound':>7}")
    for micros, steps, ratio in itertools.product((2, 4, 8), (30, 100, 400), RATIOS):
        truth = ratio * options.batch
        found = [
            one_run(rng, truth, options.batch, micros, steps) for _ in range(options.repetitions)
        ]
        print(f"{micros:>3}{steps:>7}{ratio:>7g}{shares(found, truth)}", flush=True)


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
