import argparse

import pytest

from kbatch import cli
from kbatch.commands.distribute import add_distribute


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
