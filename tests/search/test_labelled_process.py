import os
import signal
import sys
import time

import psutil
import pytest

from kbatch.search.distribute import LabelledProcess


def started(code, lines, **variables):
    words = [sys.executable, "-c", code]
    return LabelledProcess("one", words, environment=variables, write=lines.append)


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_line_has_the_name_before_it():
    lines = []
    code = (
        "import os, sys; print('a\\n\\nb'); print(os.environ['X'], file=sys.stderr)\n"
        "print('c', end='')"
    )
    process = started(code, lines, X="set")
    assert process.wait(300)
    process.close()
    assert process.status == 0
    assert sorted(lines) == ["[one] a", "[one] b", "[one] c", "[one] set"]


def test_a_progress_bar_becomes_lines():
    lines = []
    process = started("print('1/2\\r2/2')", lines)
    process.wait(300)
    process.close()
    assert lines == ["[one] 1/2", "[one] 2/2"]


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("1/0", 1)])
def test_the_status_is_that_of_the_process(code, status):
    process = started(code, [])
    assert process.wait(300)
    process.close()
    assert process.status == status


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["here", "background"])
def interruption(request):
    """This process as a shell starts it, and as a background job, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interruption_reaches_all_of_its_group_and_not_this_process(interruption):
    lines = []
    child = (
        "import time\n"
        "try: print('child waits', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt: print('child', flush=True)\n"
    )
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "try: print('parent waits', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt: child.wait(); print('parent', flush=True)\n"
    )
    process = started(code, lines)
    wait_until(lambda: {"[one] child waits", "[one] parent waits"} <= set(lines))
    process.signal(signal.SIGINT)
    assert process.wait(300)
    process.close()
    assert lines[2:] == ["[one] child", "[one] parent"]
    assert signal.getsignal(signal.SIGINT) is interruption


def test_a_process_whose_lines_cannot_be_written_goes_on_and_the_error_is_kept():
    """As where its reader has ended, or the disk is full."""
    full = OSError(28, "No space left on device")

    def write(line):
        raise full

    # Much more than a pipe holds: nobody would read it.
    words = [sys.executable, "-c", "print(100_000 * 'line\\n')"]
    process = LabelledProcess("one", words, environment={}, write=write)
    assert process.wait(300)
    process.close()
    assert (process.status, process.write_error) == (0, full)


def test_closing_ends_what_the_process_started():
    lines = []
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    process = started(code, lines)
    wait_until(lambda: lines)
    child = psutil.Process(int(lines[0].split()[1]))
    process.close()
    assert process.status == -signal.SIGKILL
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert os.getpid() != child.pid
