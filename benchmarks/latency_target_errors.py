"""How often is a batch size verified for a latency target that it does not keep to?

python benchmarks/latency_target_errors.py [--searches 2000]

No model is called: a simulated machine takes (b + 5) / 1000 s for b examples, within 2 %, and
hiccups slow a share of the calls by 100 ms, whatever the batch size. One hiccup slows so many calls
in a row on average (geometric). The sweep before the search is simulated as well: three sizes, in
shuffled rounds of blocks of 50 ms until each has 59 calls. Where more than 5 % of the calls are
slow no size keeps to a target of 60 ms at the 0.95 quantile, and whatever is verified is `wrong`,
in percent of the searches with its standard error: at most 5 are aimed at. Where fewer are slow
`verified` should be frequent. `calls` is the median of all calls of a search, after the sweep.
"""

import argparse

import numpy as np

from kbatch.inference.target_search import LatencyTargetSearch

TARGET_S, QUANTILE, HICCUP_S, DRIFT = 0.06, 0.95, 0.1, 0.2
SIZES = (1, 8, 64, 512)
BLOCK_S, NEEDED_CALLS = 0.05, 59
SHARES = (0.0, 0.005, 0.01, 0.02, 0.055, 0.07, 0.10)
RUNS = (1, 2, 3, 5)


class Machine:
    """A machine whose hiccups slow a share of the calls, `run` of them in a row on average."""

    def __init__(self, rng, share, run):
        self.rng, self.calls = rng, 0
        self.ends = 1 / run
        self.begins = share * self.ends / (1 - share)
        self.slow = rng.random() < share

    def call(self, size, calls):
        """Seconds of calls in a row."""
        self.calls += calls
        found = (size + 5) / 1000 * np.exp(0.02 * self.rng.standard_normal(calls))
        for i, draw in enumerate(self.rng.random(calls)):
            self.slow = draw >= self.ends if self.slow else draw < self.begins
            found[i] += HICCUP_S * self.slow
        return found.tolist()

    def block(self, size):
        return self.call(size, max(1, int(BLOCK_S / ((size + 5) / 1000))))


def searched(machine):
    """A search after a sweep, with a fit that knows the machine."""
    earlier = {size: [] for size in SIZES[:-1]}
    while live := [s for s in earlier if sum(map(len, earlier[s])) < NEEDED_CALLS]:
        for size in machine.rng.permutation(live):
            earlier[size].append(machine.block(size))
    machine.calls = 0
    search = LatencyTargetSearch(
        lambda latency_s: size if (size := int(1000 * latency_s - 5)) >= 1 else None,
        target_s=TARGET_S,
        quantile=QUANTILE,
        largest=SIZES[-1],
        drift=DRIFT,
        earlier=tuple(earlier.values()),
    )
    while look := search.ask():
        search.tell(machine.call(*look))
    return search


def verified_share(share, run, *, searches, seed=0):
    """Share of the searches that verify a size, and the median of their calls."""
    rng = np.random.default_rng(seed)
    machines = [Machine(rng, share, run) for _ in range(searches)]
    found = [
        any(check.outcome == "verified" for check in searched(machine).checks)
        for machine in machines
    ]
    return np.mean(found), np.median([machine.calls for machine in machines])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--searches", type=int, default=2000)
    searches = parser.parse_args().searches
    print(f"{'slow':>6}{'in a row':>10}{'verified':>10}{'wrong':>16}{'calls':>7}")
    for share in SHARES:
        for run in RUNS if share else (1,):
            found, calls = verified_share(share, run, searches=searches)
            error = np.sqrt(found * (1 - found) / searches)
            wrong = f"{found:.1%} ± {error:.1%}" if share > 1 - QUANTILE else "-"
            print(f"{share:>6.1%}{run:>10}{found:>10.1%}{wrong:>16}{calls:>7.0f}")


if __name__ == "__main__":
    main()
