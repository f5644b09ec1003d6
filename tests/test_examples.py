"""The examples run as they are, with less data or fewer epochs."""

import importlib.util
from pathlib import Path

import pytest

import kbatch

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {
    "augmentation": {"epochs": 1},
    "imbalanced_table": {"epochs": 2, "rows": 4000},
    "text": {"epochs": 2, "rows": 1000},
    "transfer_learning": {"epochs": 1},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_ends_with_an_answer(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(**ARGUMENTS[name])
    folders = list(tmp_path.glob("*/search"))
    assert len(folders) == (2 if name == "transfer_learning" else 1)
    answers = [str(kbatch.load_study(folder).decide()) for folder in folders]
    printed = capsys.readouterr().out
    assert all(answer in printed for answer in answers)
    assert all(kbatch.load_study(folder).decide().batch_size for folder in folders)
