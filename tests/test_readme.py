"""The README's Python runs from top to bottom, as a reader would run it."""

import re
from pathlib import Path

import kbatch.demo

README = Path(__file__).parents[1] / "README.md"


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = kbatch.demo.load_digits()
    names = {"x": x.reshape(-1, 64), "y": y}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 9
    for block in blocks:
        exec(block, names)
    assert names["study"].best_trial().metrics["val_accuracy"] > 0.7
    assert (tmp_path / "trials.png").stat().st_size > 10_000
    assert names["found"].max_batch_size == 1797
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "throughput.png").stat().st_size > 10_000
