"""A module of kbatch run by a Python process of its own, which imports what this one imports.

`python -m` searches the working directory before the standard library: a `pickle.py` that lies
there would run.
"""

import os
import sys
import sysconfig
from collections.abc import Sequence


def program_words(module: str, *arguments: str) -> tuple[str, ...]:
    """Make the command that runs `main` of a module."""
    path = inherited_path(sys.path, folder=os.getcwd(), script_folder=_script_folder())
    code = f"import sys; sys.path[:] = {path!a}; from {module} import main; main()"
    return (sys.executable, "-P", "-c", code, *arguments)


def inherited_path(
    path: Sequence[str], *, folder: str, script_folder: str | None = None
) -> list[str]:
    """Order the import path for a process to start: the working directory follows Python's own.

    It is on the path of `python -c`, `python -m` and notebooks, and must not hide a module of the
    standard library. The folder of a script stays where it is, since the script runs from there.
    """
    entries = [entry for entry in path if isinstance(entry, str)]
    kept, moved = [], []
    for entry in entries:
        here = not os.path.isabs(entry) or (entry == folder and entry != script_folder)
        (moved if here else kept).append(os.path.normpath(os.path.join(folder, entry)))
    at = behind_standard_library(kept)
    return list(dict.fromkeys([*kept[:at], *moved, *kept[at:]]))


def behind_standard_library(path: Sequence[str]) -> int:
    """Find the first place of an import path at which no entry hides a standard module."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {os.path.join(folder, "lib-dynload") for folder in own}
    return max((i + 1 for i, entry in enumerate(path) if entry in own), default=len(path))


def _script_folder() -> str | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else os.path.dirname(os.path.abspath(file))
