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


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.runtime
def test_a_model_is_served_by_onnx_runtime(tmp_path, monkeypatch, capsys):
    for package in ("onnxruntime", "onnx", "tf2onnx"):
        pytest.importorskip(package, reason=f"{package} is missing: make test-runtimes")
    monkeypatch.chdir(tmp_path)
    loaded("serve_onnx").main(latency_ms=1000, time_budget_s=4)
    assert "with 95 % of the calls within 1000 ms" in capsys.readouterr().out
    assert (tmp_path / "digits.onnx").exists()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_ends_with_an_answer(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded(name).main(**ARGUMENTS[name])
    folders = list(tmp_path.glob("*/search"))
    assert len(folders) == (2 if name == "transfer_learning" else 1)
    answers = [str(kbatch.load_study(folder).decide()) for folder in folders]
    printed = capsys.readouterr().out
    assert all(answer in printed for answer in answers)
    assert all(kbatch.load_study(folder).decide().batch_size for folder in folders)
