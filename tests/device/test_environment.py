import importlib.machinery
import shlex
import sys

import fake_nvml
import fake_tensorflow
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from fake_tensorflow import FakeTensorFlow

from kbatch.device.machine import (
    read_cores_left,
    read_environment,
    read_memory_kills,
    read_memory_left_bytes,
)


@pytest.mark.parametrize(
    ("words", "module", "command"),
    [
        ("some/place/train.py --epochs 3", None, "python train.py --epochs 3"),
        ("/usr/bin/kbatch report 'two words'", None, "kbatch report 'two words'"),
        ("/usr/lib/kbatch/__main__.py demo", "kbatch.__main__", "python -m kbatch demo"),
        ("my/train.py 3", "my.train", "python -m my.train 3"),
        ("train.py 3", "cProfile", "python train.py 3"),  # The spec is another program's.
        ("train.py 3", "pdb", "python train.py 3"),  # There is no spec.
        ("ipykernel_launcher.py -f k.json", None, "# run the cells of the notebook again"),
    ],
)
def test_read_environment_command(words, module, command, monkeypatch):
    program, *others = shlex.split(words)
    monkeypatch.setattr("sys.argv", [program, *others])
    origin = "/usr/lib/cProfile.py" if module == "cProfile" else program
    spec = module and importlib.machinery.ModuleSpec(module, None, origin=origin)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    if module == "pdb":
        monkeypatch.delattr(sys.modules["__main__"], "__spec__")
    assert read_environment().command == command


BUILT = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}


@pytest.mark.parametrize(
    ("library", "driver"), [(FakeNvml(FakeGpu()), {"nvidia-driver": "580.65.06"}), (None, {})]
)
def test_read_environment_versions_with_a_gpu(monkeypatch, library, driver):
    fake_nvml.install(monkeypatch, library)
    fake_tensorflow.install(monkeypatch, FakeTensorFlow("0000:01:00.0"))
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: BUILT)
    environment = read_environment()
    assert environment.devices == ("GPU:0 Fake GPU",)
    assert {"cuda": "12.5.1", "cudnn": "9", **driver}.items() <= environment.versions.items()
    assert ("nvidia-driver" in environment.versions) == bool(driver)


GIB = 2**30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("mine", "left"),
    [
        ({"memory__max": "max", "memory__current": 0}, 3 * GIB),
        ({"memory__max": 4 * GIB, "memory__current": 2 * GIB}, 2 * GIB),
        ({"memory__max": 16 * GIB, "memory__current": 2 * GIB}, 3 * GIB),
        # More than a limit that was lowered.
        ({"memory__max": 4 * GIB, "memory__current": 6 * GIB}, 0),
        # Half of it is cached files.
        (
            {
                "memory__max": 4 * GIB,
                "memory__current": 4 * GIB,
                "memory__stat": f"anon 1\nactive_file 2\ninactive_file {2 * GIB}\nslab 4",
            },
            2 * GIB,
        ),
    ],
)
def test_read_memory_left_bytes_least_of_all_groups(tmp_path, mine, left):
    write(tmp_path / "jobs", memory__max=8 * GIB, memory__current=5 * GIB)
    write(tmp_path / "jobs" / "mine", **mine)
    assert read_memory_left_bytes(tmp_path, "0::/jobs/mine\n") == left
    assert read_memory_left_bytes(tmp_path, "0::/\n") is None


def test_read_memory_left_bytes_in_a_container(tmp_path):
    """The path is the host's, but the mount is the container's."""
    write(tmp_path, memory__max=2 * GIB, memory__current=0)
    assert read_memory_left_bytes(tmp_path, "0::/docker/abc\n") == 2 * GIB


def test_read_cores_left_least_quota(tmp_path):
    assert read_cores_left(tmp_path, "0::/jobs/mine\n") is None
    write(tmp_path / "jobs", cpu__max="250000 100000")
    write(tmp_path / "jobs" / "mine", cpu__max="max 100000")
    assert read_cores_left(tmp_path, "0::/jobs/mine\n") == 2
    write(tmp_path / "jobs" / "mine", cpu__max="50000 100000")
    assert read_cores_left(tmp_path, "0::/jobs/mine\n") == 1


def test_read_memory_kills(tmp_path):
    assert read_memory_kills(tmp_path, "0::/job\n") == 0
    write(tmp_path / "job", memory__events="low 7\noom 9\noom_kill 3\noom_group_kill 8")
    assert read_memory_kills(tmp_path, "0::/job\n") == 3
    assert read_memory_kills(tmp_path, "0::/\n") == 0
