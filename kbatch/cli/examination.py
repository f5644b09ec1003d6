"""The examination of a machine before it trains."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kbatch.device.doctor import Examination, Finding, PolicySpeed, read_package_findings

if TYPE_CHECKING:
    from kbatch.device.host_checks import NvidiaReading


def examine(variables: Mapping[str, str]) -> Examination:
    """Look at versions, devices, memory and the speed of dtype policies.

    Where a package is missing the rest is left out: it could not be read.
    """
    packages = read_package_findings()
    if any(finding.status == "missing" for finding in packages):
        return Examination(packages, (), None)
    from kbatch.device.host_checks import read_nvidia

    return _examine_devices(packages, read_nvidia(), variables)


def _examine_devices(
    packages: tuple[Finding, ...], nvidia: "NvidiaReading", variables: Mapping[str, str]
) -> Examination:
    from kbatch.device.environment import read_environment
    from kbatch.device.host_checks import nvidia_findings, read_host_findings, read_tensorflow_build

    environment = read_environment()
    host = read_host_findings(environment.cpu_count, variables=variables)
    speeds, policy = _policies("CPU" if environment.devices == ("CPU",) else "GPU")
    build = read_tensorflow_build()
    devices = nvidia_findings(nvidia, environment.devices, build=build, variables=variables)
    return Examination((*packages, *devices, *host, policy), speeds, environment)


def _policies(device: str) -> tuple[tuple[PolicySpeed, ...], Finding]:
    import tensorflow as tf

    from kbatch.device.failures import failure_text
    from kbatch.training.dtype_policy import measure_policy_speeds, policy_finding

    try:
        speeds = measure_policy_speeds()
    except tf.errors.OpError as error:
        text = f"a train step fails on this {device}: {failure_text(error)}"
        return (), Finding("dtype policy", "missing", text)
    return speeds, policy_finding(speeds, device)
