import fake_nvml
import fake_tensorflow
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from fake_tensorflow import FakeTensorFlow

from kbatch.device.environment import read_environment


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["some/place/train.py", "--epochs", "3"], "python train.py --epochs 3"),
        (["/usr/bin/kbatch", "demo"], "kbatch demo"),
        (
            ["/usr/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"],
            "# run the cells of the notebook again",
        ),
    ],
)
def test_the_command_is_what_a_person_would_type_again(words, command, monkeypatch):
    monkeypatch.setattr("sys.argv", words)
    assert read_environment().command == command


BUILT = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}


@pytest.mark.parametrize(
    ("library", "driver"),
    [(FakeNvml(FakeGpu()), {"nvidia-driver": "580.65.06"}), (None, {})],
)
def test_what_decides_the_speed_of_a_gpu_is_among_the_versions(monkeypatch, library, driver):
    fake_nvml.install(monkeypatch, library)
    fake_tensorflow.install(monkeypatch, FakeTensorFlow("0000:01:00.0"))
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: BUILT)
    found = read_environment()
    assert found.devices == ("GPU:0 Fake GPU",)
    assert {"cuda": "12.5.1", "cudnn": "9", **driver}.items() <= found.versions.items()
    assert ("nvidia-driver" in found.versions) == bool(driver)
