import pytest

from kbatch.timing.rounds import FEWEST_ROUNDS, interleaved


class Clock:
    """A clock that goes on when a contender works."""

    def __init__(self, seconds):
        self.now_s, self.seconds, self.calls = 0.0, seconds, []

    def contender(self, name):
        def run():
            self.calls.append(name)
            self.now_s += self.seconds
            return self.now_s

        return run


def run(clock, *, until_s, most_rounds=50, names="abcd"):
    contenders = {name: clock.contender(name) for name in names}
    return interleaved(
        contenders, until_s=until_s, most_rounds=most_rounds, now=lambda: clock.now_s
    )


def test_each_round_holds_every_contender_once_in_changing_order():
    clock = Clock(1.0)
    found = run(clock, until_s=1e9, most_rounds=20)
    rounds = [clock.calls[i : i + 4] for i in range(0, 80, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5
    assert all(len(results) == 20 for results in found.values())
    assert found["a"] == sorted(found["a"])


@pytest.mark.parametrize("until_s", [0.0, 15.0, 16.0, 40.0, 43.9])
def test_no_round_beyond_the_third_ends_after_the_budget(until_s):
    clock = Clock(1.0)
    found = run(clock, until_s=until_s)
    rounds = len(found["a"])
    assert rounds == max(FEWEST_ROUNDS, until_s // 4)
    assert rounds == FEWEST_ROUNDS or clock.now_s <= until_s
