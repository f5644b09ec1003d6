"""Where numbers were measured, for the line that stands beside them."""

from kbatch.records.environment import EnvironmentRecord

_NAMES = {"tensorflow": "TensorFlow", "keras": "Keras"}
UNKNOWN_DEVICE = "n/a (device not recorded)"


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """Lists the device and the versions of TensorFlow and Keras, such as `"Keras 3.15.1"`."""
    if environment is None:
        return [UNKNOWN_DEVICE]
    return [environment.device, *versions_text(environment)]


def versions_text(environment: EnvironmentRecord | None) -> list[str]:
    """Lists the versions alone, none where they were not recorded."""
    versions = environment.versions if environment else {}
    return [
        f"{name} {versions[package]}" for package, name in _NAMES.items() if package in versions
    ]
