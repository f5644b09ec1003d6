"""The notebooks run from top to bottom, and are committed with outputs that tell nothing else."""

import json
import re
import sys

import pytest
from code_blocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
MOST_BYTES = 300_000


def cells_of(path):
    return json.loads(path.read_text())["cells"]


def texts_of(path):
    """All texts of the outputs, pictures left out."""
    for cell in cells_of(path):
        for output in cell.get("outputs", []):
            kinds = [output.get("text", []), *output.get("data", {}).values()]
            names = [None, *output.get("data", {})]
            for name, lines in zip(names, kinds, strict=True):
                if name is None or name.startswith("text/"):
                    yield "".join(lines)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run_with_figures_and_without_errors_or_places(path):
    assert len(NOTEBOOKS) >= 4
    counts = [cell["execution_count"] for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells_of(path) for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert all("".join(output.get("data", {}).get("text/plain", "?")) for output in outputs)
    assert path.stat().st_size < MOST_BYTES
    for text in texts_of(path):
        assert not re.search(r"/(tmp|home|root|work|Users)/|ipykernel_", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    sys.path.insert(0, str(path.parent))
    try:
        from execute import executed
    finally:
        sys.path.pop(0)
    executed(path)
