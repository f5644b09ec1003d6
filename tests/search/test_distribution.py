"""A chief and two workers on this host, whose processes are killed for real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import kbatch
from kbatch.study.caveats import caveats

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "search" / "distributed_search.py"

WORKERS = ("tuner0", "tuner1")
# Waits until it is interrupted; a worker then needs a moment to write what it has.
WAITING = """
import os, pathlib, sys, time
name, folder = os.environ["KERASTUNER_TUNER_ID"], pathlib.Path(sys.argv[1])
try:
    (folder / f"{name} waits").touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0 if name == "chief" else float(sys.argv[3]))
    (folder / name).write_text(str(time.time()))
    raise
"""

pytestmark = pytest.mark.slow


class Run:
    """`kbatch distribute` in a process of its own."""

    def __init__(self, directory, *, kind="grid", seconds=1.0, mode="go on", script=SCRIPT):
        self.project = directory / "search"
        words = [str(script), str(directory), kind, str(seconds), mode]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kbatch", "distribute", "--workers", "2", *words],
            env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'search'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.everyone = {}

    def named(self, name):
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                self.everyone.setdefault(process.pid, process)
                if process.environ().get("KERASTUNER_TUNER_ID") == name:
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"{name} does not run")

    def wait_until(self, condition, timeout_s=600):
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < end
            time.sleep(0.1)

    def wait_for_trials(self, count):
        """Waits until so many trials train."""
        self.wait_until(lambda: len(list(self.project.glob("trial_*/kbatch.json"))) >= count)

    def end(self, timeout_s=600):
        output, _ = self.process.communicate(timeout=timeout_s)
        return output

    def left(self):
        """Those still running a moment after the end."""
        gone, alive = psutil.wait_procs(list(self.everyone.values()), timeout=300)
        assert len(gone) + len(alive) >= 3
        return alive


def statuses(project):
    return {t.trial_id: t.status for t in kbatch.load_study(project).trials}


def known_as_completed(project, trial_id):
    state = json.loads((project / f"trial_{trial_id}" / "trial.json").read_text())
    return state["status"] == "COMPLETED"


@pytest.mark.parametrize("kind", ["grid", "kbatch", "isolated"])
def test_a_killed_worker_is_started_again_and_its_trial_goes_on(tmp_path, kind):
    run = Run(tmp_path, kind=kind, mode="overwrite")
    run.wait_for_trials(2)
    run.named("tuner0").kill()
    output = run.end()
    assert run.process.returncode == 0, output
    assert "[kbatch] tuner0 died by signal 9 and is started again" in output
    # What follows the search runs in the chief alone.
    assert sum("] best" in line for line in output.splitlines()) == 1
    assert "[chief] best" in output
    study = kbatch.load_study(run.project)
    assert study.problems == ()
    assert [t.batch_size for t in study.trials] == [8, 16, 32]
    for trial in study.trials:
        assert trial.status == "completed"
        (execution,) = trial.executions
        assert len(execution.epochs) == 3
        assert execution.workers_on_device == 2
    assert any("shared by 2 workers" in caveat.text for caveat in caveats(study))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_after_an_interruption(tmp_path, number):
    run = Run(tmp_path, kind="random", seconds=30)
    run.wait_for_trials(2)
    for name in ("chief", *WORKERS):
        run.named(name)
    os.kill(run.process.pid, number)
    output = run.end()
    assert run.left() == []
    assert run.process.returncode == (-9 if number == signal.SIGKILL else 130), output
    if number != signal.SIGKILL:
        assert set(statuses(run.project).values()) == {"interrupted"}


def test_the_chief_answers_until_its_interrupted_workers_have_ended(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    run = Run(tmp_path, script=script, seconds=0.5)
    run.wait_until(lambda: len(list(tmp_path.glob("* waits"))) == 3)
    run.process.send_signal(signal.SIGINT)
    run.end()
    ended_s = {name: float((tmp_path / name).read_text()) for name in ("chief", *WORKERS)}
    assert ended_s["chief"] == max(ended_s.values())


def test_a_second_interruption_ends_the_wait_for_the_workers_and_not_the_chief(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    run = Run(tmp_path, script=script, seconds=15)
    run.wait_until(lambda: len(list(tmp_path.glob("* waits"))) == 3)
    for name in ("chief", *WORKERS):
        run.named(name)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert run.left() == []
    assert (tmp_path / "chief").exists()
    assert not any((tmp_path / name).exists() for name in WORKERS)


@pytest.mark.parametrize("kind", ["random", "kbatch"])
def test_a_dead_chief_ends_the_workers_and_a_new_one_goes_on_where_it_stood(tmp_path, kind):
    first = Run(tmp_path, kind=kind, seconds=3)
    first.wait_for_trials(3)
    for name in WORKERS:
        first.named(name)
    first.named("chief").kill()
    output = first.end()
    assert first.process.returncode == 1
    assert "The chief ended with signal 9" in output
    assert first.left() == []
    before = statuses(first.project)
    # A trial may have ended just when there was no chief to tell.
    done = [trial_id for trial_id in before if known_as_completed(first.project, trial_id)]
    assert done
    written = {i: (first.project / f"trial_{i}" / "kbatch.json").stat().st_mtime for i in done}
    second = Run(tmp_path, kind=kind, seconds=0)
    output = second.end()
    assert second.process.returncode == 0, output
    assert set(statuses(second.project).values()) == {"completed"}
    assert statuses(second.project).keys() >= before.keys()
    if kind == "random":
        return  # keras-tuner's oracle.json may be older than the trials, and runs them again.
    for i in done:
        assert (first.project / f"trial_{i}" / "kbatch.json").stat().st_mtime == written[i]


def test_a_mistake_in_the_script_ends_all(tmp_path):
    script = tmp_path / "mistaken.py"
    script.write_text("raise ValueError('no data here')")
    run = Run(tmp_path, script=script)
    output = run.end()
    assert run.process.returncode == 1
    assert "ValueError: no data here" in output
    assert "ended with status 1" in output
