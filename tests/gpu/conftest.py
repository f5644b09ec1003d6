"""Checks that need an NVIDIA GPU: each runs in a process of its own, and all make one page.

Without a GPU they are skipped with the reason. To run their bodies on a CPU all the same, with a
small allocator that runs out as a GPU's does: KBATCH_GPU_CHECKS=cpu make test-gpu.
"""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kbatch.device.machine import opened_nvml

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("KBATCH_GPU_CHECKS") == "cpu"
# Set in the process of one check.
ALONE = "KBATCH_GPU_CHECK"
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


class Check(pytest.Item):
    """One check, which pytest runs in a process of its own."""

    def runtest(self):
        file = self.config._tmp_path_factory.mktemp("gpu") / "report.xml"
        words = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        environment = os.environ | {ALONE: "1"}
        if ON_CPU:
            from kbatch.device.memory import limited_cpu  # It starts TensorFlow.

            environment |= limited_cpu(Scale(on_gpu=False).limit_bytes)
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
            environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # Where its memory ends, its units crash.
        process = subprocess.Popen(
            [sys.executable, *words, f"--junitxml={file}", self.nodeid],
            cwd=self.config.rootpath,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Workers of a check that hangs end with it.
        )
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        if process.returncode not in (0, 1):
            pytest.fail(f"{_crash(output)}\n{process.returncode=}\n{output[-8000:]}", pytrace=False)
        report = ElementTree.parse(file).getroot()
        self.user_properties += [(p.get("name"), p.get("value")) for p in report.iter("property")]
        for found in (*report.iter("error"), *report.iter("failure")):
            pytest.fail(f"{found.get('message')}\n{found.text}", pytrace=False)
        for found in report.iter("skipped"):
            pytest.skip(found.get("message"))

    def reportinfo(self):
        return self.path, None, self.name


def _crash(output):
    """What the native code of a process that died wrote last, before Python's stack."""
    words = ("Fatal", "Check failed", "terminate called", "CUDA_ERROR")
    found = [line for line in output.splitlines() if any(word in line for word in words)]
    return found[0].strip() if found else "it died without a word of why"


def pytest_collection_modifyitems(items):
    if ALONE in os.environ:
        return
    with opened_nvml() as (found, unavailable):
        reason = f"needs an NVIDIA GPU. {unavailable or 'NVML lists none.'}"
    absent = not (ON_CPU or found or any(Path("/dev").glob("nvidia[0-9]*")))
    for place, item in enumerate(items):
        if item.get_closest_marker("gpu"):
            items[place] = check = Check.from_parent(item.parent, name=item.name)
            if absent:
                check.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config):
    if ALONE not in os.environ:
        config.pluginmanager.register(_Page())


# What no CPU shows, and no run on a GPU has shown yet.
TO_CONFIRM = (
    'a trial that runs out of memory halves its micro-batch, plain and with `jit_compile=True`: "a '
    'trial that runs out halves its micro batch"',
    "a search compiles at most one module for each size and two more, and takes at most 0.48 of a "
    "loop that compiles too: `python benchmarks/search_overhead.py --xla --nets cnn,mlp,resnet`",
)


class _Page:
    """Says what a GPU must still confirm, and writes the page of what the checks found.

    It is written after each check, because a run may be stopped.
    """

    def __init__(self):
        self._reports = []
        self._path = None

    def pytest_report_header(self):
        return ["A GPU must still confirm:", *(f"  {one}" for one in TO_CONFIRM)]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and "gpu" in report.keywords:
            self._reports.append(report)
            self._write()

    def pytest_terminal_summary(self, terminalreporter):
        if self._path is not None:
            terminalreporter.write_line(f"written: {self._path.relative_to(ROOT)}")

    def _write(self):
        facts = [dict(report.user_properties) for report in self._reports]
        found = next((one["environment"] for one in facts if "environment" in one), None)
        if found is None:
            return
        environment = ast.literal_eval(found)
        devices, versions = ", ".join(environment["devices"]), environment["versions"]
        title = f"{devices}, TensorFlow {versions['tensorflow']}"
        outcomes = [report.outcome for report in self._reports]
        counts = ", ".join(f"{outcomes.count(word)} {word}" for word in dict.fromkeys(outcomes))
        seconds = sum(report.duration for report in self._reports)
        lines = [
            *("---", "orphan: true", "---", "", f"# GPU checks: {title}", ""),
            f"`make test-gpu`, {environment['created_at'][:10]}: {counts}, in {seconds:.0f} s.",
            *("", "| | |", "|---|---|", f"| system | {environment['platform']} |"),
            *(f"| {name} | {value} |" for name, value in versions.items()),
            *("", "| Check | Outcome | Seconds | Measured |", "|---|---|---:|---|"),
        ]
        for report, known in zip(self._reports, facts, strict=True):
            name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
            told = [f"{key}: {value}" for key, value in known.items() if key != "environment"]
            if not report.passed:
                text = report.longrepr[-1] if report.skipped else report.longreprtext
                told = [*text.splitlines()[:1], *told]
            cells = name, report.outcome, f"{report.duration:.0f}", "; ".join(told)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        folder = ROOT / ("build" if ON_CPU else "docs") / "gpu-checks"
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace("gpu:0", "")).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.md"
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(text):
    # What would end a cell or begin a tag.
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")[:400]
