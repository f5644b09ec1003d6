import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpus import (
    NvmlUnavailableError,
    opened_nvml,
)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "There is no NVIDIA driver"),
        (FakeNvml(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "driver is not loaded"),
        (FakeNvml(init=pynvml.NVML_ERROR_NO_PERMISSION), "Insufficient Permissions"),
        (object(), "Function Not Found"),
    ],
)
def test_without_a_driver_one_line_says_why(monkeypatch, library, reason):
    fake_nvml.install(monkeypatch, library)
    with pytest.raises(NvmlUnavailableError, match=reason) as raised, opened_nvml():
        pass
    assert len(str(raised.value).splitlines()) == 1


def test_the_library_is_closed_however_the_block_ends(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(KeyboardInterrupt), opened_nvml(), opened_nvml():
        assert library.users == 2
        raise KeyboardInterrupt
    assert library.users == 0


def test_a_driver_that_went_away_does_not_cover_what_the_block_raised(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(ValueError, match="mine"), opened_nvml():
        library.users = 0
        raise ValueError("mine")
