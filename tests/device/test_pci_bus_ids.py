import pytest

from kbatch.device.gpus import devices_by_bus_id, normal_bus_id

# As TensorFlow's C++ writes `physical_device_desc`.
DESCRIPTION = "device: 0, name: NVIDIA H100, pci bus id: 0000:0b:00.0, compute capability: 9.0"


@pytest.mark.parametrize(
    "text",
    ["0000:0b:00.0", "00000000:0B:00.0", "0000:0B:00.0", " 0000:0b:00.0\n", "0:0b:00.0", "0:0b:00"],
)
def test_one_place_has_one_form(text):
    assert normal_bus_id(text) == "00000000:0b:00.0"


def test_the_form_is_its_own_and_other_places_stay_apart():
    texts = ["0000:01:00.0", "0001:01:00.0", "0000:02:00.0", "0000:01:01.0", "0000:01:00.1"]
    normal = [normal_bus_id(text) for text in texts]
    assert len(set(normal)) == len(texts)
    assert [normal_bus_id(text) for text in normal] == normal
    assert normal_bus_id("10000:01:00.0") == "00010000:01:00.0"


@pytest.mark.parametrize("text", ["", "<undefined>", "0000:01", "GPU-5f0c", "0000:01:00.0.1"])
def test_what_is_no_bus_id_has_none(text):
    assert normal_bus_id(text) is None


def test_devices_are_found_by_their_descriptions():
    other = DESCRIPTION.replace("0b:", "c1:")
    found = devices_by_bus_id(
        [("/device:CPU:0", ""), ("/device:GPU:0", other), ("/device:GPU:1", DESCRIPTION)]
    )
    assert found == {"00000000:c1:00.0": ("GPU:0",), "00000000:0b:00.0": ("GPU:1",)}
    assert next(iter(found)) == "00000000:c1:00.0"


def test_logical_devices_of_one_gpu_belong_together():
    found = devices_by_bus_id([("/device:GPU:0", DESCRIPTION), ("/device:GPU:1", DESCRIPTION)])
    assert found == {"00000000:0b:00.0": ("GPU:0", "GPU:1")}
