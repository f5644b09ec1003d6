import pytest

from kbatch.throughput.record import TimedRounds


def test_an_update_takes_the_median_over_its_rounds():
    assert TimedRounds(64, 64, (0, 1, 2), (0.01, 0.09, 0.02)).median_s == 0.02


@pytest.mark.parametrize("rounds", [(), (0, 1, 2)])
def test_durations_need_their_rounds(rounds):
    with pytest.raises(ValueError, match="a duration in each of its rounds"):
        TimedRounds(64, 64, rounds, (0.01,) if rounds else ())
