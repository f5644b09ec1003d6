"""The findings of `kbatch doctor`."""

import importlib.metadata
import os
import re
import subprocess
import sys

import fake_nvml
import psutil
import pytest
from fake_nvml import FakeGpu, FakeNvml

from kbatch.cli.doctor import gpu_findings, memory_finding, package_findings, policy_finding
from kbatch.device.machine import available_bytes

GIB = 2**30


def test_package_findings_versions():
    others = ['pytest>=99; extra == "test"', 'tomli>=99; python_version < "3"']
    (finding,) = package_findings(["keras<4,>=3", *others])
    assert finding.status == "ok"
    assert finding.text.startswith("python 3.")
    assert finding.text.endswith(f", keras {importlib.metadata.version('keras')}")


def test_package_findings_missing_package():
    versions, finding = package_findings(["keras>=3", "no-such-package>=2.18"])
    assert "no-such-package" not in versions.text
    assert (finding.topic, finding.status) == ("no-such-package", "missing")
    assert finding.command == "pip install --upgrade 'no-such-package>=2.18'"


@pytest.mark.parametrize(
    ("version", "allowed"),
    [("3.9", False), ("4.0", False), ("3.14.0", True), ("3.15.0rc1", True), ("3.100", True)],
)
def test_package_findings_compare_versions_as_numbers(version, allowed, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    _, *findings = package_findings(["keras<4,>=3.14"])
    assert [finding[:2] for finding in findings] == [("keras", "warning")] * (not allowed)
    assert allowed or findings[0].command == "pip install --upgrade 'keras<4,>=3.14'"


LOST, MIG, UNIFIED = {"lost": True}, {"mig": 1}, {"memory_total_bytes": None}


@pytest.mark.parametrize(
    ("gpus", "devices", "variables", "topic", "status", "words"),
    [
        ([{}, LOST], "GPU:0 Example", {}, "TensorFlow", "ok", "sees GPU:0"),
        ([LOST], "CPU", {}, "GPU", "ok", "no working GPU"),
        ([MIG], "GPU:0 Example", {}, "GPU 0", "ok", "together), 8.00 GiB of 80.0 GiB free"),
        ([MIG | UNIFIED], "GPU:0 Example", {}, "GPU 0", "ok", "instances together), free mem"),
        ([UNIFIED], "GPU:0 Example", {}, "GPU 0", "ok", "free memory n/a"),
        ([{}], "GPU:0 Example", {}, "GPU 0", "warning", "8.00 GiB of 80.0 GiB free"),
        ([{}], "CPU", {"CUDA_VISIBLE_DEVICES": "-1"}, "TensorFlow", "warning", "DEVICES=-1"),
        ([{}], "CPU", {}, "TensorFlow", "missing", "sees none"),
    ],
)
def test_gpu_findings(monkeypatch, gpus, devices, variables, topic, status, words):
    fake_nvml.install(monkeypatch, FakeNvml(*(FakeGpu(**gpu) for gpu in gpus)))
    by_topic = {finding.topic: finding for finding in gpu_findings(lambda: (devices,), variables)}
    assert (words in by_topic[topic].text, by_topic[topic].status) == (True, status)
    assert len(by_topic) == 1 + len([gpu for gpu in gpus if gpu != LOST])
    assert status == "ok" or by_topic[topic].command


def test_memory_finding():
    finding = memory_finding(16 * GIB, 12 * GIB)
    assert (finding.status, finding.text) == ("ok", "12.0 GiB of 16.0 GiB free")
    assert memory_finding(16 * GIB, GIB // 2).status == "warning"
    assert 0 < available_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("device", "half", "brain", "status", "advice"),
    [
        # On a CPU a search uses float32 if float16 takes more than twice as long.
        ("CPU", 0.4, 0.5, "ok", "a search uses float32"),
        ("CPU", 0.6, 0.5, "warning", '; pass dtype_policy="float32" to BatchSizeHyperModel'),
        ("GPU", 0.4, 0.5, "warning", '; pass dtype_policy="float32" to BatchSizeHyperModel'),
        ("GPU", 1.65, 1.71, "ok", "a search uses mixed_float16"),
        ("GPU", 1.5, 2.1, "warning", '; pass dtype_policy="mixed_bfloat16" to BatchSizeHyperModel'),
    ],
)
def test_policy_finding(device, half, brain, status, advice):
    ratios = {"float32": 1.0, "mixed_float16": half, "mixed_bfloat16": brain}
    finding = policy_finding(ratios, device)
    assert (finding.status, finding.text.endswith(advice)) == (status, True)
    words = "as fast as" if half > 1 else "slower than"
    assert f"mixed_float16 is {max(half, 1 / half):.2f} times {words} float32" in finding.text


def doctor(**variables):
    """Run the command in a new process."""
    words, variables = [sys.executable, "-m", "kbatch", "doctor"], {**os.environ, **variables}
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_doctor_on_this_machine():
    done = doctor(KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    for topic in ("packages", "GPU", "memory", "dtype policy"):
        assert f" {topic} " in done.stdout
    assert re.search("times (as fast as|slower than) float32", " ".join(done.stdout.split()))


def test_doctor_with_another_backend():
    done = doctor(KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "$ export KERAS_BACKEND=tensorflow" in done.stdout
    assert "missing: backend" in done.stdout
    assert "dtype policy" not in done.stdout
