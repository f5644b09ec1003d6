"""Checks that need an NVIDIA GPU: each runs in a process of its own, and all make one page.

Without a GPU they are skipped with the reason. To run their bodies on a CPU all the same, with a
small allocator that runs out as a GPU's does: KBATCH_GPU_CHECKS=cpu make test-gpu.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_page
import pytest

from kbatch.device.gpus import opened_nvml

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("KBATCH_GPU_CHECKS") == "cpu"
# Set in the process of one check: where it writes its reports.
REPORTS = "KBATCH_GPU_CHECK_REPORTS"
LONGEST_S = 1500 if ON_CPU else 240
MIB = 2**20


class Scale:
    """Sizes that suit the device.

    Attributes:
        on_gpu: Whether the checks run on a GPU.
        limit_bytes: Memory of a process that is to run out; a CPU has it from the start.
        more_bytes: A larger memory, of workers.
        width: Filters of a convolution of which some hundred rows of 32 x 32 fill it.
    """

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu
        self.limit_bytes = (880 if on_gpu else 110) * MIB
        self.more_bytes = (2080 if on_gpu else 260) * MIB
        self.width = 64 if on_gpu else 16


@pytest.fixture(scope="session")
def scale():
    """Sizes for the GPU that TensorFlow sees."""
    import tensorflow as tf

    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    if not on_gpu and not ON_CPU:
        pytest.fail("there is an NVIDIA GPU and TensorFlow sees none: see `kbatch doctor`")
    return Scale(on_gpu)


@pytest.fixture
def limited(scale):
    """TensorFlow with the small memory, in this process."""
    from kbatch.device.memory import limit_gpu
    from kbatch.library_internals import fail_at_once_without_memory

    fail_at_once_without_memory()
    limit_gpu(scale.limit_bytes)
    return scale


def pytest_configure(config):
    config.pluginmanager.register(_Reporter(config) if REPORTS in os.environ else _Page(config))


def pytest_collection_modifyitems(items):
    if ON_CPU or REPORTS in os.environ:
        return
    with opened_nvml() as (found, unavailable):
        reason = f"needs an NVIDIA GPU. {unavailable or 'NVML lists none.'}"
    if not found and not any(Path("/dev").glob("nvidia[0-9]*")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if REPORTS in os.environ or item.get_closest_marker("skip") or not _is_check(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_in_fresh_process(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _is_check(item):
    return item.get_closest_marker("gpu") is not None


def _run_in_fresh_process(item):
    file = item.config._tmp_path_factory.mktemp("gpu") / "reports"
    words = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", item.nodeid]
    environment = os.environ | {REPORTS: str(file)}
    if ON_CPU:
        from kbatch.device.memory import limited_cpu  # It starts TensorFlow.

        environment |= limited_cpu(Scale(on_gpu=False).limit_bytes)
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
        environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # Where its memory ends, its units crash.
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=item.config.rootpath,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Workers of a check that hangs end with it.
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
        ended = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ended = f"did not end within {LONGEST_S} s"
    seconds = time.perf_counter() - started_s
    lines = file.read_text().splitlines() if file.exists() else []
    reports = []
    for data in map(json.loads, lines):
        if isinstance(data["longrepr"], list):  # A tuple, before it was written.
            data["longrepr"] = tuple(data["longrepr"])
        hook = item.config.hook.pytest_report_from_serializable
        reports.append(hook(config=item.config, data=data))
    if not any(report.when == "teardown" for report in reports):
        reports.append(
            pytest.TestReport(
                item.nodeid,
                item.location,
                dict.fromkeys(item.keywords, 1),
                "failed",
                f"{output[-8000:]}\nits process {ended}: {_crash(output)}",
                "call",
            )
        )
    # With the start of the process, which no part of the test counts.
    reports[-1].user_properties.append(("seconds", seconds))
    return reports


def _crash(output):
    """What the native code of a process that died wrote last, before Python's stack."""
    words = ("Fatal", "Check failed", "terminate called", "CUDA_ERROR")
    found = [line for line in output.splitlines() if any(word in line for word in words)]
    return found[0].strip() if found else "no word of why"


class _Reporter:
    """In the process of a check: writes its reports for the process that started it."""

    def __init__(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


class _Page:
    """Collects what the checks found, and writes the page after each: a run may be stopped."""

    def __init__(self, config):
        self._checks = {}
        self._started_s = time.perf_counter()
        self._path = None

    def pytest_runtest_logreport(self, report):
        if "gpu" in report.keywords:
            self._checks.setdefault(report.nodeid, gpu_page.Check(report.nodeid)).add(report)

    def pytest_runtest_logfinish(self):
        checks = [check for check in self._checks.values() if "seconds" in check.facts]
        environment = next(
            (c.facts["environment"] for c in checks if "environment" in c.facts), None
        )
        if environment is None:
            return
        folder = ROOT / ("build" if ON_CPU else "docs") / "gpu-checks"
        text = gpu_page.page(checks, environment, time.perf_counter() - self._started_s)
        self._path = folder / f"{gpu_page.file_name(environment)}.md"
        folder.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text, encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter):
        if self._path is not None:
            terminalreporter.write_line(f"written: {self._path.relative_to(ROOT)}")
