"""The stub of a tracker in place of an installed one."""

import importlib
import sys
from pathlib import Path


def stub_trackio(monkeypatch):
    """Let `import trackio` find the stub, in which nothing was written yet."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stub_trackers"))
    stub = importlib.import_module("trackio")
    monkeypatch.setitem(sys.modules, "trackio", stub)
    return stub
