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


def test_without_tensorboard_it_says_that_every_trial_fails():
    found = findings(tensorboard=None)["tensorboard"]
    assert found.status == "missing"
    assert "every trial fails" in found.text


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
    assert re.search(r"runs? on (\S+) \(", found.text)[1] == backend


def test_keras_home_replaces_the_home_directory(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    variables = {"KERAS_HOME": str(tmp_path)}
    found = backend_finding(variables, tmp_path / "home")
    assert f"run on jax ({tmp_path / 'keras.json'})" in found.text


def test_another_backend_is_refused_with_the_command(tmp_path):
    found = backend_finding({"KERAS_BACKEND": "jax"}, tmp_path)
    assert (found.status, found.command) == ("missing", "export KERAS_BACKEND=tensorflow")
    assert "(KERAS_BACKEND)" in found.text
    assert backend_finding({"KERAS_BACKEND": "tensorflow"}, tmp_path).status == "ok"


def test_this_installation_is_whole():
    found = {finding.topic: finding for finding in read_package_findings()}
    assert {"python", "tensorflow", "keras-tuner", "tensorboard", "backend"} <= set(found)
    assert [f for f in found.values() if f.status == "missing"] == []
