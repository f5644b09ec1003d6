import pytest

from kbatch.profiling.inference_target import expected_drift


def test_room_grows_with_the_noise_of_the_rounds_and_is_never_small():
    assert expected_drift(None) == expected_drift(0.0) == pytest.approx(0.12)
    assert expected_drift(0.2) == pytest.approx(0.329)
    found = [expected_drift(noise) for noise in (0.0, 0.05, 0.1, 0.2, 0.5)]
    assert found == sorted(found)
