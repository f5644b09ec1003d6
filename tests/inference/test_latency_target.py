"""The search for a latency target, on simulated machines."""

import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.intervals import quantile_upper_bound
from kbatch.inference.target_search import LatencyTargetSearch

TARGET_S = 0.02


class Machine:
    """Calls take (b + 5) / 1000 s times a lognormal factor. The fit is wrong by a factor."""

    def __init__(self, *, spread=0.02, fit_error=1.0, seed=0):
        self.rng = np.random.default_rng(seed)
        self.spread = spread
        self.fit_error = fit_error

    def typical_s(self, size):
        return (size + 5) / 1000

    def call(self, size, calls):
        return list(self.typical_s(size) * np.exp(self.spread * self.rng.normal(size=calls)))

    def guess(self, latency_s):
        size = int(1000 * latency_s * self.fit_error - 5)
        return size if size >= 1 else None

    def largest(self):
        """The size whose 0.95 quantile equals the target."""
        return TARGET_S * 1000 / np.exp(1.645 * self.spread) - 5

    def search(self, *, left_s=math.inf, **changed):
        arguments = {"target_s": TARGET_S, "quantile": 0.95, "largest": 1000}
        search = LatencyTargetSearch(self.guess, **(arguments | changed))
        while look := search.ask(left_s=left_s):
            calls_s = self.call(*look)
            left_s -= sum(calls_s)
            search.tell(calls_s)
        return search.checks


def largest_verified(checks):
    verified = (check for check in checks if check.outcome == "verified")
    return max(verified, key=lambda check: check.batch_size, default=None)


def test_target_search_finds_nearly_the_largest_size():
    cases = itertools.product(range(5), (0.0, 0.02, 0.1), (0.6, 0.9, 1.0, 1.1, 1.5))
    for seed, spread, fit_error in cases:
        machine = Machine(spread=spread, fit_error=fit_error, seed=seed)
        checks = machine.search()
        best = largest_verified(checks)
        assert best is not None
        assert best.batch_size <= machine.largest() * 1.1
        assert machine.typical_s(best.batch_size) >= 0.7 * machine.typical_s(machine.largest())
        assert len(checks) <= 6


def test_target_search_leaves_a_margin_for_drift():
    (check,) = Machine(spread=0.0).search()  # An exact fit needs one check.
    assert (check.batch_size, check.outcome, len(check.latencies_s)) == (13, "verified", 138)
    for drift, seed in itertools.product((0.1, 0.3), range(10)):
        best = largest_verified(Machine(spread=0.05, seed=seed).search(drift=drift))
        assert quantile_upper_bound(best.latencies_s, quantile=0.95) <= TARGET_S
        assert np.quantile(best.latencies_s, 0.95) * (1 + drift) <= TARGET_S
        assert Machine(spread=0.05).typical_s(best.batch_size) >= 0.6 * TARGET_S / (1 + drift)


@pytest.mark.parametrize(
    ("slow", "slow_s", "verified"),
    [
        (0, 0.0, True),
        (6, 0.0101, True),  # They are within the margin, but few.
        (12, 0.0101, False),
        (2, 0.0121, False),  # The quantile meets the target, but its upper bound does not.
    ],
)
def test_target_search_verifies_bound_and_margin(slow, slow_s, verified):
    latencies_s = [0.0099] * (138 - slow) + [slow_s] * slow
    search = LatencyTargetSearch(
        lambda latency_s: 8, target_s=0.012, quantile=0.95, largest=8, drift=0.2
    )
    search.tell(latencies_s)
    left_s = 30.0
    while look := search.ask(left_s=left_s):
        calls_s = [0.0119] * look[1]  # The quantile is within the margin.
        search.tell(calls_s)
        left_s -= sum(calls_s)
    assert (search.checks[0].outcome == "verified") is verified


def test_target_search_ends_a_check_early_only_if_fast_calls_cannot_help():
    fast, slow = 0.5 * TARGET_S, 2 * TARGET_S
    for count in range(20):
        search = LatencyTargetSearch(lambda _: 8, target_s=TARGET_S, quantile=0.95, largest=64)
        _, calls = search.ask(left_s=1)
        latencies_s = [slow] * count + [fast] * (calls - count)
        check = search.tell(latencies_s)
        is_missed = np.quantile(latencies_s + [fast] * calls, 0.95) > TARGET_S
        assert (check is not None) <= is_missed
    assert check.outcome == "missed"
    # So short a check could lie within a hiccup.
    search = LatencyTargetSearch(lambda _: 8, target_s=1e-4, quantile=0.95, largest=64)
    assert search.tell([2e-4] * 69) is None


def test_target_search_makes_more_calls_only_if_the_size_can_still_pass():
    check, *_ = Machine(spread=0.0, fit_error=1.3).search()
    assert (check.outcome, len(check.latencies_s)) == ("missed", 59)
    slow = iter([True] + [False] * 1000)
    machine = Machine(spread=0.0)
    machine.call = lambda size, calls: [0.03 if next(slow) else 0.019 for _ in range(calls)]
    (check,) = machine.search()
    assert (check.outcome, len(check.latencies_s)) == ("verified", 138 + 4 * 138)


@pytest.mark.parametrize(("slow", "again"), [(6, True), (8, False)])
def test_target_search_looks_again_only_if_the_quantile_meets_the_target(slow, again):
    search = LatencyTargetSearch(lambda _: 8, target_s=TARGET_S, quantile=0.95, largest=8)
    latencies_s = np.full(138, 0.9 * TARGET_S)
    latencies_s[: 10 * slow : 10] = 2 * TARGET_S
    search.tell(latencies_s)
    assert search.ask(left_s=1)[0] == (8 if again else 4)
    assert search.ask(left_s=0) is None
    assert [check.outcome for check in search.checks] == ["unsure" if again else "missed"]


class Hiccups(Machine):
    """A machine that delays a share of its calls by ten times the target, `run` in a row."""

    def __init__(self, *, share, run, seed):
        super().__init__(seed=seed)
        self.ends = 1 / run
        self.begins = share * self.ends / (1 - share)
        self.slow = self.rng.random() < share

    def call(self, size, calls):
        calls_s = np.array(super().call(size, calls))
        for i, draw in enumerate(self.rng.random(calls)):
            self.slow = draw >= self.ends if self.slow else draw < self.begins
            calls_s[i] += 10 * TARGET_S * self.slow
        return list(calls_s)

    def verifies(self):
        """Whether a search after a sweep of three sizes verifies a size."""
        earlier = [[self.call(size, 59)] for size in (1, 4, 8)]
        return largest_verified(self.search(drift=0.2, earlier=earlier, left_s=30)) is not None


def share_verified(searches, **machine):
    return np.mean([Hiccups(seed=seed, **machine).verifies() for seed in range(searches)])


@pytest.mark.parametrize(
    ("share", "run"), [(0.07, 1), pytest.param(0.07, 3, marks=pytest.mark.slow), (0.055, 5)]
)
def test_target_search_seldom_verifies_if_no_size_meets_the_target(share, run):
    # More than 5 % of the calls are slow at every size.
    assert share_verified(100, share=share, run=run) <= 0.05


@pytest.mark.parametrize(("share", "run"), [(0.0, 1), (0.01, 1), (0.005, 3)])
def test_target_search_verifies_in_spite_of_rare_hiccups(share, run):
    assert share_verified(40, share=share, run=run) >= 0.85


@pytest.mark.parametrize(
    ("slow_s", "outcome"), [([0.01, 0.01, 0.01, 0.3], "unsure"), ([0.03], "verified")]
)
def test_target_search_doubts_a_verified_size_after_many_hiccups_later(slow_s, outcome):
    # The fit is too low, so that a second size follows the first.
    search = LatencyTargetSearch(
        Machine(fit_error=0.5).guess, target_s=TARGET_S, quantile=0.95, largest=1000
    )
    while len(search.checks) < 2:
        _, calls = search.ask(left_s=60)
        later = itertools.islice(itertools.cycle(slow_s), calls)
        search.tell(list(later) if search.checks else [0.009] * calls)
    first, second = search.checks
    assert (first.outcome, second.outcome) == (outcome, "missed")
