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
        timeout=120,
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
    assert several["gpus"][0]["mean"] == [0.5, GIB, 300.0, 60]
    assert several["gpus"][0]["throttling"] == [700.0, ["power cap"]]
    assert "energy 14.0 J (driver's counter)" in several["timeline"]


def test_what_is_not_supported_is_unknown_and_has_no_panel(found):
    unsupported = found["unsupported readings"]
    assert unsupported["gpus"][0]["mean"] == [None, GIB, None, None]
    assert unsupported["gpus"][0]["throttling"] == [None, None]
    assert unsupported["joules_per_sample"] is None
    assert unsupported["panels"] == ["Memory reserved\n(GiB)"]
    (old,) = found["an old driver"]["gpus"]
    assert (old["mean"][3], old["throttling"][1]) == (71, ["power cap"])


def test_a_counter_that_wraps_is_not_trusted_wherever_it_ends(found):
    assert found["a counter that wraps"]["gpus"][0]["energy"] == [900.0, "power"]


def test_a_gpu_that_disappears_leaves_the_others_and_is_named(found):
    lost = found["a GPU that disappears"]
    # It was there at 0 s and 1 s; the first one is read at the end once more.
    assert [gpu["energy"][1] for gpu in lost["gpus"]] == ["counter", None]
    assert lost["joules_per_sample"] is None
    assert lost["timeline"].count("no answer after") == 1
    assert "no answer after 1.00 s" in lost["timeline"]
    status, text, _ = found["doctor: a GPU is lost"]["NVML"]
    assert (status, "GPU 1 (GPU is lost)" in text) == ("warning", True)
    status, text, _ = found["doctor: the GPU is lost"]["GPU"]
    assert (status, "GPU 0 (GPU is lost)" in text) == ("missing", True)


def test_an_instance_has_tensorflows_memory_and_the_boards_power_and_says_so(found):
    assert found["an instance"]["gpus"][0]["memory"] == [10 * GIB, 3 * GIB]
    assert found["an instance"]["gpus"][0]["uuid"] == "GPU-0000"  # Of which board.
    assert found["an instance"]["panels"] == ["Memory held\n(GiB)", "Power\n(W)"]
    assert "(MIG): power and energy are the whole board's" in found["an instance"]["timeline"]
    _, text, _ = found["doctor: an instance"]["GPU 0"]
    assert "all power are the whole board's" in text
    assert "GPU 1" in found["doctor: an instance"]
    assert "has none of them" in found["doctor: no instance"]["GPU"][1]


def test_of_a_memory_shared_with_the_host_tensorflows_count_is_used(found):
    unified = found["unified memory"]
    assert unified["gpus"][0]["memory"] == [10 * GIB, 3 * GIB]
    assert "MIG" not in unified["timeline"]
    findings = found["doctor: unified memory"]
    assert findings["NVML"][1] == "shows 1 GPU, driver 550.54.15"
    status, text, _ = findings["GPU 0"]
    assert "TensorFlow's count" in text
    assert (status, "12.0 is newer" in text) == ("warning", True)


def test_a_driver_that_differs_from_its_library_is_named_as_that(found):
    assert "differ in version" in found["driver mismatch"]["unavailable"]
    status, text, _ = found["doctor: driver mismatch"]["GPU"]
    assert (status, "differ in version" in text) == ("missing", True)


@pytest.mark.parametrize(
    ("case", "topic", "status", "says", "mend"),
    [
        ("old driver", "GPU", "missing", "550.54.15 is too old: it runs CUDA up to 11.4 and", None),
        ("old GPU", "GPU", "missing", "is too old: its compute capability is 5.2", None),
        ("no tensor cores", "GPU 0", "warning", "mixed_float16 saves memory and no time", None),
        ("a GPU in use", "GPU 0", "warning", ") 60.0 GiB", None),
        ("no such GPU", "GPU", "warning", "names no GPU that is here (0: Stub H100)", "unset"),
        ("no such UUID", "GPU", "warning", "names no GPU that is here", "unset"),
        ("hidden", "GPU", "warning", "hides the GPU", "unset"),
        ("CPU only", "GPU", "missing", "was built for CPUs only", "tensorflow-cpu"),
        ("missing library", "GPU", "missing", "nvidia-cudnn-cu12", "tensorflow[and-cuda]"),
        ("unloadable library", "GPU", "missing", "could not be loaded", "TF_CPP_MIN_LOG_LEVEL=0"),
    ],
)
def test_the_doctor_names_each_cause_apart(found, case, topic, status, says, mend):
    finding_status, text, command = found[f"doctor: {case}"][topic]
    assert finding_status == status
    assert says in text
    assert (command is None) == (mend is None)
    assert mend is None or mend in command
