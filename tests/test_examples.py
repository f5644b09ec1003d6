"""The examples run as they are, with less data or fewer epochs."""

import os
import subprocess
import sys

import pytest
from code_blocks import ROOT

import kbatch

pytestmark = pytest.mark.slow
ARGUMENTS = {
    "augmentation": {"epochs": 1},
    "imbalanced_table": {"epochs": 2, "rows": 4000},
    "several_gpus": {"epochs": 2, "sizes": (32, 128)},
    "text": {"epochs": 2, "rows": 1000},
    "transfer_learning": {"epochs": 1},
}


def printed(name, folder, **arguments):
    """Run an example in a new process, because TensorFlow's devices cannot be changed later."""
    code = f"import {name}; {name}.main(**{arguments})"
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT)])}
    how = {"cwd": folder, "env": os.environ | own, "check": True, "text": True}
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, **how).stdout


@pytest.mark.runtime
def test_serve_onnx_prints_batch_size(tmp_path):
    for package in ("onnxruntime", "onnx", "tf2onnx"):
        pytest.importorskip(package, reason=f"{package} is missing: make test-runtimes")
    output = printed("serve_onnx", tmp_path, latency_ms=1000, time_budget_s=4)
    assert "with 95 % of the calls within 1000 ms" in output
    assert (tmp_path / "digits.onnx").exists()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_prints_answer(name, tmp_path):
    output = printed(name, tmp_path, **ARGUMENTS[name])
    studies = [kbatch.load_study(folder) for folder in tmp_path.glob("*/search")]
    assert len(studies) == (2 if name == "transfer_learning" else 1)
    for study in studies:
        decision = study.decide()
        assert decision.batch_size
        short = f"batch size {decision.batch_size}, learning rate {decision.learning_rate:.3g}\n"
        assert (short if name == "transfer_learning" else str(decision)) in output
        replicas = {run.replicas for trial in study.trials for run in trial.executions}
        assert replicas == {2 if name == "several_gpus" else 1}
