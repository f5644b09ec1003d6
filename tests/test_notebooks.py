"""The notebooks run from top to bottom, and their stored outputs are complete and clean."""

import json
import re
import sys

import pytest
from code_blocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
MOST_BYTES = 300_000
# Paths of a machine, log lines, and lines of progress.
UNWANTED = (
    r"/(tmp|home|root|work|Users)/|ipykernel_|(?m:^[IWEF]\d{4} |^(trial|training) \d)|ms/step"
)


def cells_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_clean_outputs_of_one_run(path):
    assert len(NOTEBOOKS) == 4
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(len(cell["outputs"]) <= 1 for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all("".join(output.get("data", {}).get("text/plain", "?")) for output in outputs)
    assert path.stat().st_size < MOST_BYTES
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name", "stdout") == "stdout"
        texts = {"text/stdout": output.get("text", [])} | output.get("data", {})
        for kind, lines in texts.items():
            assert not (kind.startswith("text/") and re.search(UNWANTED, "".join(lines)))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    sys.path.insert(0, str(path.parent))
    try:
        from execute import executed
    finally:
        sys.path.pop(0)
    executed(path)
