import argparse
import signal
import types

import keras_tuner
import psutil
import pytest
from keras_tuner.src.distribute import oracle_chief
from keras_tuner.src.engine.oracle import LOCKS

from kbatch.cli import main as cli
from kbatch.cli.machine import add_distribute
from kbatch.search.distribute import DistributionPlan, run_distributed
from kbatch.search.distributed_script import give_lock_back


def test_what_follows_the_script_is_the_scripts():
    parser = argparse.ArgumentParser()
    add_distribute(parser.add_subparsers())
    found = parser.parse_args(["distribute", "--workers", "4", "s.py", "--workers", "9", "-x", "a"])
    assert found.workers == 4
    assert str(found.script) == "s.py"
    assert found.arguments == ["--workers", "9", "-x", "a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0", "{script}"], "--workers 0"),
        (["--workers", "2", "--restarts", "-1", "{script}"], "--restarts -1"),
        (["--workers", "2", "nowhere.py"], "no such script"),
        (["--workers", "2", "--join", "{script}"], "--chief-address"),
        (["--workers", "2", "--chief-address", "host", "{script}"], "host and a port"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, message, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    assert cli.main(["distribute", *(word.format(script=script) for word in words)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


OUTPUT = """
import time
print(100_000 * "line\\n", flush=True)
time.sleep(600)
"""


def test_output_that_cannot_be_written_ends_all_with_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OUTPUT)
    before = set(psutil.Process().children())
    written = []

    def write(line):
        written.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    plan = DistributionPlan(words=(str(script),), workers=2)
    with pytest.raises(OSError, match=r"run the same command again.*Received: .*Broken pipe"):
        run_distributed(plan, write)
    assert written
    assert set(psutil.Process().children()) <= before


def test_a_chief_gives_its_lock_back_after_a_bad_call():
    class Servicer(oracle_chief.OracleServicer):
        """That of keras-tuner."""

    give_lock_back(Servicer)
    oracle = keras_tuner.oracles.RandomSearchOracle("val_loss", max_trials=2)
    request = types.SimpleNamespace(trial_id="nobody's", metrics={}, step=0)
    with pytest.raises(KeyError):
        Servicer(oracle).UpdateTrial(request, None)
    assert not LOCKS[oracle].locked()
    assert oracle_chief.exit_chief(oracle)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_what_the_shell_ignores_stays_ignored(tmp_path, number):
    """As SIGHUP does under `nohup`."""
    script = tmp_path / "script.py"
    script.write_text("")
    before = signal.signal(number, signal.SIG_IGN)
    seen = []
    try:
        plan = DistributionPlan(words=("-",), workers=1)
        with pytest.raises(ChildProcessError):
            run_distributed(plan, lambda line: seen.append(signal.getsignal(number)))
    finally:
        signal.signal(number, before)
    assert set(seen) == {signal.SIG_IGN}
