import json
import re

import pytest

from kbatch.device.doctor import (
    backend_finding,
    package_findings,
    python_finding,
    read_package_findings,
)

REQUIREMENTS = [
    "keras>=3.15",
    "keras-tuner>=1.4.8",
    "tensorboard>=2.20",
    "rich>=15.0.0",
    "jinja2",
    'pytest>=8; extra == "test"',
]
INSTALLED = {
    "keras": "3.15",
    "keras-tuner": "1.4.8",
    "tensorboard": "2.21.0",
    "rich": "15",
    "jinja2": "3.1.6",
}


def findings(**changed):
    installed = {**INSTALLED, **{name.replace("_", "-"): v for name, v in changed.items()}}
    installed = {name: version for name, version in installed.items() if version is not None}
    return {finding.topic: finding for finding in package_findings(REQUIREMENTS, installed)}


def test_what_is_required_is_found_and_extras_are_left_out():
    found = findings()
    assert list(found) == ["keras", "keras-tuner", "tensorboard", "rich", "jinja2"]
    assert {finding.status for finding in found.values()} == {"ok"}
    assert {finding.command for finding in found.values()} == {None}
    assert found["keras-tuner"].text == "1.4.8"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    found = findings(keras_tuner=None)["keras-tuner"]
    assert found.status == "missing"
    assert found.command == "pip install --upgrade 'keras-tuner>=1.4.8'"
    assert "every trial fails" in findings(tensorboard=None)["tensorboard"].text


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("3.14.9", "warning"),
        ("3.9", "warning"),
        ("2.99", "warning"),
        ("3.15", "ok"),
        ("3.15.0rc1", "ok"),
        ("3.100", "ok"),
        ("4.0", "ok"),
    ],
)
def test_versions_are_compared_as_numbers(version, status):
    found = findings(keras=version)["keras"]
    assert found.status == status
    assert (found.command is not None) == (status == "warning")


@pytest.mark.parametrize(
    ("version", "status"), [("3.10.12", "missing"), ("3.11.0", "ok"), ("3.13", "ok")]
)
def test_python_is_compared(version, status):
    assert python_finding(version, ">=3.11").status == status


@pytest.mark.parametrize(
    ("variables", "settings", "backend"),
    [
        ({}, None, "tensorflow"),
        ({}, {"backend": "jax"}, "jax"),
        ({}, {"floatx": "float32"}, "tensorflow"),
        ({}, "no JSON", "tensorflow"),
        ({"KERAS_BACKEND": "torch"}, {"backend": "jax"}, "torch"),
        ({"KERAS_BACKEND": ""}, {"backend": "jax"}, "jax"),
    ],
)
def test_the_backend_is_read_as_keras_reads_it(variables, settings, backend, tmp_path):
    if settings is not None:
        (tmp_path / ".keras").mkdir()
        text = settings if isinstance(settings, str) else json.dumps(settings)
        (tmp_path / ".keras" / "keras.json").write_text(text)
    found = backend_finding(variables, tmp_path)
    # Keras's own variable names the folder itself.
    elsewhere = {"KERAS_HOME": str(tmp_path / ".keras")} | variables
    for one in (found, backend_finding(elsewhere, tmp_path / "home")):
        assert re.search(r"runs? on (\S+) \(", one.text)[1] == backend
        assert one.status == ("ok" if backend == "tensorflow" else "missing")
    assert (found.command == "export KERAS_BACKEND=tensorflow") is (found.status == "missing")


def test_this_installation_is_whole():
    found = {finding.topic: finding for finding in read_package_findings()}
    assert {"python", "tensorflow", "keras-tuner", "tensorboard", "backend"} <= set(found)
    assert [f for f in found.values() if f.status == "missing"] == []
