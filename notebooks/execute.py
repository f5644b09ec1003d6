"""Executes notebooks from top to bottom and writes their outputs into them.

python notebooks/execute.py [NOTEBOOK ...]     all beside this file if none is named
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def executed(path):
    """Gives a notebook with new outputs; the files that it writes are deleted."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    return notebook


def main(paths):
    """Executes notebooks in place."""
    for path in paths or sorted(HERE.glob("[0-9]*.ipynb")):
        print(path, flush=True)
        notebook = executed(path)
        notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
