"""GPUs read by the real `pynvml` from a stub of NVIDIA's library, in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GIB = 2**30


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the programs of nvml_scenarios.py found, by name."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc or clang) for the stub of NVIDIA's library")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(HERE / "nvml_stub.c")]
    subprocess.run(words, check=True)
    path = f"{folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}".strip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(HERE / "nvml_scenarios.py")],
        env={**os.environ, "LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_neither_tensorflow_nor_the_library_stays_open(found):
    assert (found["tensorflow"], found["users"]) == (False, 0)


def test_several_gpus_stand_in_tensorflows_order_with_their_energy(found):
    several = found["several GPUs"]
    assert [(gpu["name"], gpu["devices"]) for gpu in several["gpus"]] == [
        ("Stub A100", ["GPU:0"]),
        ("Stub H100", ["GPU:1"]),
    ]
    # Three readings: at the start, after a second and at the end.
    assert [gpu["energy"] for gpu in several["gpus"]] == [[14.0, "counter"], [10.0, "counter"]]
    assert several["joules_per_sample"] == 2.4
    assert several["gpus"][0]["mean"] == [0.5, GIB, 300.0]
    assert "energy 14.0 J (driver's counter)" in several["timeline"]


def test_what_is_not_supported_is_unknown_and_has_no_panel(found):
    unsupported = found["unsupported readings"]
    assert unsupported["gpus"][0]["mean"] == [None, GIB, None]
    assert unsupported["joules_per_sample"] is None
    assert unsupported["panels"] == ["Memory reserved\n(GiB)"]


def test_a_counter_that_wraps_is_not_trusted_wherever_it_ends(found):
    assert found["a counter that wraps"]["gpus"][0]["energy"] == [900.0, "power"]


def test_a_gpu_that_disappears_leaves_the_others_and_is_named(found):
    lost = found["a GPU that disappears"]
    # It was there at 0 s and 1 s; the first one is read at the end once more.
    assert [gpu["energy"][1] for gpu in lost["gpus"]] == ["counter", None]
    assert lost["joules_per_sample"] is None
    assert lost["timeline"].count("no answer after") == 1
    assert "no answer after 1.00 s" in lost["timeline"]
    assert list(found["doctor: a GPU is lost"]) == ["GPU 0", "TensorFlow"]
    assert "lists none that answers" in found["doctor: the GPU is lost"]["GPU"][1]


def test_of_an_instance_the_board_is_read_and_it_says_so(found):
    assert found["an instance"]["gpus"][0]["memory"] == [80 * GIB, GIB]
    assert found["an instance"]["panels"] == ["Memory reserved\n(GiB)", "Power\n(W)"]
    assert "(MIG): readings are the whole board's" in found["an instance"]["timeline"]
    assert "on all its instances (MIG)" in found["doctor: an instance"]["GPU 0"][1]
    assert "GPU 1" in found["doctor: an instance"]


def test_a_memory_shared_with_the_host_is_not_known(found):
    unified = found["unified memory"]
    assert unified["gpus"][0]["memory"] == [None, None]
    assert "MIG" not in unified["timeline"]
    assert "free memory n/a" in found["doctor: unified memory"]["GPU 0"][1]


@pytest.mark.parametrize(
    ("case", "topic", "status", "says", "mend"),
    [
        ("a GPU in use", "GPU 0", "warning", "19.0 GiB of 80.0 GiB free", "nvidia-smi"),
        ("hidden", "TensorFlow", "warning", "CUDA_VISIBLE_DEVICES=-1", "unset"),
        ("not seen", "TensorFlow", "missing", "sees none", "'tensorflow[and-cuda]'"),
    ],
)
def test_the_doctor_says_what_to_do(found, case, topic, status, says, mend):
    finding_status, text, command = found[f"doctor: {case}"][topic]
    assert finding_status == status
    assert says in text
    assert mend in command
