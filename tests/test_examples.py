"""The examples run as they are, with less data or fewer epochs."""

import importlib.util
import os
import subprocess
import sys

import pytest
from code_blocks import ROOT

import kbatch

EXAMPLES = ROOT / "examples"
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


def test_examples_are_short_and_documented():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*ARGUMENTS, "several_gpus", "serve_onnx", "search_on_cluster"}
    page = (ROOT / "docs/examples.md").read_text()
    for name in names:
        assert f"/examples/{name}.py" in page
        most = 65 if name == "search_on_cluster" else 40
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most, name


@pytest.mark.slow
@pytest.mark.runtime
def test_serve_onnx_prints_batch_size(tmp_path, monkeypatch, capsys):
    for package in ("onnxruntime", "onnx", "tf2onnx"):
        pytest.importorskip(package, reason=f"{package} is missing: make test-runtimes")
    monkeypatch.chdir(tmp_path)
    loaded("serve_onnx").main(latency_ms=1000, time_budget_s=4)
    assert "with 95 % of the calls within 1000 ms" in capsys.readouterr().out
    assert (tmp_path / "digits.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_prints_answer(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded(name).main(**ARGUMENTS[name])
    decisions = [kbatch.load_study(folder).decide() for folder in tmp_path.glob("*/search")]
    assert len(decisions) == (2 if name == "transfer_learning" else 1)
    printed = capsys.readouterr().out
    for decision in decisions:
        assert decision.batch_size
        short = f"batch size {decision.batch_size}, learning rate {decision.learning_rate:.3g}"
        assert (short if name == "transfer_learning" else str(decision)) in printed


@pytest.mark.slow
def test_several_gpus_trains_on_two_logical_devices(tmp_path):
    # In a process of its own: logical devices are made before the first use of TensorFlow.
    code = "import several_gpus; several_gpus.main(epochs=2, sizes=(32, 128))"
    paths = os.pathsep.join([str(EXAMPLES), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    study = kbatch.load_study(tmp_path / "gpus" / "search")
    assert study.decide().batch_size in (32, 128)
    assert str(study.decide()) in done.stdout
    assert {run.replicas for trial in study.trials for run in trial.executions} == {2}
