import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpus import (
    GpuReading,
    NvmlUnavailableError,
    opened_nvml,
    read_driver_version,
    read_gpu,
    read_gpu_count,
    read_processes,
)
from kbatch.records.usage import GpuProcess


def read(monkeypatch, *gpus, **arguments):
    fake_nvml.install(monkeypatch, FakeNvml(*gpus, **arguments))
    with opened_nvml() as listed:
        return [read_gpu(gpu) for gpu in listed]


def test_every_gpu_is_listed_with_what_it_is(monkeypatch):
    fake_nvml.install(
        monkeypatch,
        FakeNvml(FakeGpu(), FakeGpu(bus_id=b"00000001:C1:00.0", name=b"Other", power_mw=None)),
    )
    with opened_nvml() as (first, second):
        assert (first.name, first.pci_bus_id) == ("Fake GPU", "00000000:01:00.0")
        assert (second.name, second.pci_bus_id) == ("Other", "00000001:c1:00.0")
        assert first.memory_total_bytes == 80 * 2**30
        assert first.uuid == "GPU-0000aaaa"
        assert read_driver_version() == "580.65.06"


def test_the_processes_on_a_gpu_are_listed_with_what_they_hold(monkeypatch):
    gpus = (
        FakeGpu(processes={5_000_009: None, 5_000_007: 2**30}),
        FakeGpu(bus_id=b"00000000:02:00.0"),
    )
    fake_nvml.install(monkeypatch, FakeNvml(*gpus))
    with opened_nvml() as (first, second):
        assert read_processes(first) == (
            GpuProcess(5_000_007, 2**30),
            GpuProcess(5_000_009, None),
        )
        assert read_processes(second) == ()


def test_gpus_that_do_not_answer_are_counted(monkeypatch):
    fake_nvml.install(monkeypatch, FakeNvml(FakeGpu(lost=True), FakeGpu()))
    with opened_nvml() as listed:
        assert (len(listed), read_gpu_count()) == (1, 2)


def test_readings_come_in_the_units_of_their_names(monkeypatch):
    (reading,) = read(monkeypatch, FakeGpu(utilization_percent=37, power_mw=412_500))
    assert reading == GpuReading(0.37, 72 * 2**30, 412.5, 1_000_000)


FIELDS = {
    "utilization_percent": "utilization",
    "power_mw": "power_w",
    "energy_mj": "energy_counter_mj",
    "memory_total_bytes": "memory_used_bytes",
}


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_gpu_does_not_support_is_none_and_the_rest_is_read(monkeypatch, field):
    (reading,) = read(monkeypatch, FakeGpu(**{field: None}))
    assert {name for name, value in reading._asdict().items() if value is None} == {FIELDS[field]}


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "There is no NVIDIA driver"),
        (FakeNvml(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "differ in version"),
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


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_library_is_closed_however_the_block_ends(monkeypatch, error):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    try:
        with opened_nvml(), opened_nvml():
            assert library.users == 2
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error
    assert library.users == 0


def test_a_driver_that_went_away_does_not_cover_what_the_block_raised(monkeypatch):
    library = fake_nvml.install(monkeypatch, FakeNvml(FakeGpu()))
    with pytest.raises(ValueError, match="mine"), opened_nvml():
        library.users = 0
        raise ValueError("mine")
