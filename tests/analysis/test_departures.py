import numpy as np
import pytest

from kbatch.analysis.line_fit import measure_departure

PLACES = np.repeat(np.arange(8), 4)


def noise(seed, places=PLACES, size=0.05):
    return size * np.random.default_rng(seed).normal(size=len(places))


@pytest.mark.parametrize("repetitions", [2, 3, 10])
def test_the_noise_is_found_whatever_the_repetitions(repetitions):
    places = np.repeat(np.arange(8), repetitions)
    found = [measure_departure(places, noise(seed, places)).noise for seed in range(200)]
    np.testing.assert_allclose(np.mean(found), 0.05, rtol=0.05)


@pytest.mark.parametrize(("count", "repetitions"), [(3, 2), (8, 2), (8, 10)])
def test_a_right_curve_is_seldom_refused(count, repetitions):
    places = np.repeat(np.arange(count), repetitions)
    refused = [measure_departure(places, noise(s, places)).holds is False for s in range(300)]
    assert np.mean(refused) < 0.06


def test_a_wrong_curve_is_refused():
    bent = np.where(PLACES == 3, 0.3, 0.0)
    departures = [measure_departure(PLACES, noise(seed) + bent) for seed in range(60)]
    assert np.mean([departure.holds is False for departure in departures]) > 0.95
    np.testing.assert_allclose(np.mean([d.worst for d in departures]), 0.3, rtol=0.05)


def test_a_departure_too_small_to_matter_is_none():
    bent = np.where(PLACES == 3, 0.015, 0.0)
    assert measure_departure(PLACES, noise(0, size=1e-5) + bent).holds
    assert measure_departure(PLACES, noise(0, size=1e-5) + 2 * bent).holds is False


def test_a_hiccup_here_and_there_is_neither_departure_nor_noise():
    residuals = noise(0)
    residuals[[0, 9, 22]] += [5.0, 3.0, 9.0]
    departure = measure_departure(PLACES, residuals)
    assert departure.holds
    assert departure.noise < 0.1
