"""Executes notebooks from top to bottom and writes their outputs into them.

python notebooks/execute.py [NOTEBOOK ...]     all beside this file if none is named
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent


def executed(path):
    """Returns a notebook with new outputs; the files that it writes are deleted."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=600, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
    return notebook


def drop_empty(notebook):
    """Leaves out the outputs of progress that has ended, which show nothing."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if one.get("data") != {"text/plain": ""}]


def shrink_pictures(notebook):
    """Reduces pictures to 64 colours, at which their files have a quarter of the size."""
    for output in (one for cell in notebook.cells for one in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            content = io.BytesIO(base64.b64decode(output.data["image/png"]))
            picture, smaller = Image.open(content).convert("RGB").quantize(64), io.BytesIO()
            picture.save(smaller, "png", optimize=True)
            output.data["image/png"] = base64.b64encode(smaller.getvalue()).decode()


def main(paths):
    """Executes notebooks in place."""
    for path in paths or sorted(HERE.glob("[0-9]*.ipynb")):
        print(path, flush=True)
        notebook = executed(path)
        drop_empty(notebook)
        shrink_pictures(notebook)
        notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
