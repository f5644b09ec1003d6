"""kbatch answers which batch size a Keras model should use, and why.

Every name is imported when it is first used, so `import kbatch` is fast and a report never
starts TensorFlow.
"""

import importlib
import re
from pathlib import Path

__version__ = "0.3.0"

# The stub beside this file has a line for each public name.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME_OF = {name: home for home, name in re.findall(r"from (\S+) import \(?\s*(\w+) as", _STUB)}
__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kbatch' has no attribute {name!r}")
    home = _HOME_OF[name]
    if home == "kbatch":  # A package of its own.
        return importlib.import_module(f"kbatch.{name}")
    globals()[name] = value = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
