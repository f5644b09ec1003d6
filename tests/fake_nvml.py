"""A stub of NVML's shared library, under the real `pynvml`."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pynvml
import pytest

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


class FakeGpu(ctypes.Structure):
    """One GPU, as in nvml_stub.c; a reading that is None is not supported."""

    _fields_ = (
        *((name, ctypes.c_char * 96) for name in ("bus_id", "name", "uuid")),
        *((name, ctypes.c_int) for name in ("lost", "mig")),
        *((name, ctypes.c_longlong) for name in ("memory_total_bytes", "memory_used_bytes")),
        *((name, ctypes.c_longlong) for name in ("utilization_percent", "power_mw")),
        *((name, ctypes.c_longlong) for name in ("energy_mj", "energy_step_mj")),
    )

    def __init__(self, **changed):
        usual = {
            "bus_id": b"00000000:01:00.0",
            "name": b"Fake GPU",
            "uuid": b"GPU-0000aaaa",
            "mig": None,
            "memory_total_bytes": 80 * 2**30,
            "memory_used_bytes": 72 * 2**30,
            "utilization_percent": 50,
            "power_mw": 300_000,
            "energy_mj": 1_000_000,
        }
        for name, value in (usual | changed).items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        unknown = b"" if name == "uuid" else -1
        super().__setattr__(name, unknown if value is None else value)


class FakeNvml:
    """The library with some GPUs, once it is installed.

    Args:
        gpus: The GPUs.
        init: What `nvmlInitWithFlags` returns.
    """

    def __init__(self, *gpus, init=pynvml.NVML_SUCCESS):
        self._given, self._init = gpus, init

    def load(self):
        self.gpus = (FakeGpu * 8).in_dll(_stub(), "gpus")
        self.gpus[: len(self._given)] = self._given
        for name in ("users", "calls"):
            _number(name).value = 0
        _number("gpu_count").value, _number("init_error").value = len(self._given), self._init
        return _stub()

    @property
    def users(self):
        """How often it is open."""
        return _number("users").value

    @property
    def calls(self):
        """How often the power was read."""
        return _number("calls").value


@functools.cache
def _stub():
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc or clang) for the stub of NVIDIA's library")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        source = Path(__file__).with_name("nvml_stub.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def _number(name):
    return ctypes.c_int.in_dll(_stub(), name)


def tensorflow_uses(monkeypatch, devices):
    """Lets TensorFlow use GPUs, by PCI bus id."""
    monkeypatch.setattr("kbatch.device.memory.tensorflow_gpus", lambda: devices)


def install(monkeypatch, library):
    """Lets `pynvml` load this library for the length of a test; None is a machine without one."""
    loaded = library.load() if isinstance(library, FakeNvml) else library

    def load(name):
        if loaded is None:
            raise OSError(f"{name}: cannot open shared object file")
        return loaded

    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    return library
