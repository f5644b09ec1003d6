import pytest

from kbatch.instruments.environment import read_environment


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["some/place/train.py", "--epochs", "3"], "python train.py --epochs 3"),
        (["/usr/bin/kbatch", "demo"], "kbatch demo"),
        (
            ["/usr/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"],
            "# run the cells of the notebook again",
        ),
    ],
)
def test_the_command_is_what_a_person_would_type_again(words, command, monkeypatch):
    monkeypatch.setattr("sys.argv", words)
    assert read_environment().command == command
