"""What several commands share: memory sizes, models and data by name, and a quiet start."""

import contextlib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def quantity(text: str, units: Mapping[str, float], required: str) -> float:
    """Read a positive number with its unit; an error begins with `required`, up to what came."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(found[1]) * units[found[2]] if found else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0:
        raise ValueError(f"{required} {text}.")
    return value


_POWERS = {
    f"{unit}{i}": base**power
    for power, unit in enumerate("kmgt", start=1)
    for i, base in (("", 1000), ("i", 1024))
}
_BYTES = {"": 1, "b": 1} | _POWERS | {f"{unit}b": size for unit, size in _POWERS.items()}


def memory_size(text: str) -> int:
    required = "A size of memory is a number with a unit, such as 2GiB or 500MB. Received:"
    return int(quantity(text, _BYTES, required))


def milliseconds(text: str) -> float:
    """Read a time with its unit, such as 20ms or 0.5s."""
    required = "`--slo` must be a positive time with its unit, such as 20ms, 500us or 0.1s."
    units_ms = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    return quantity(text, units_ms, f"{required} Received: --slo")


BUILD, DATA = "MODULE:BUILD", "--data"


def named(text: str, option: str) -> Any:
    """Import what `package.module:name` or `file.py:name` names; the present folder is searched."""
    module_name, name = split_name(text, option)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # A module that it imports is missing.
        raise _not_found(text, option) from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = sorted(n for n, v in vars(found).items() if callable(v) and n[0] != "_")
            raise ValueError(
                f"`{option}` names a function that the module does not have: give one of "
                f"{', '.join(names) or 'its names'}. Received: {option} {text}."
            )
        found = getattr(found, part)
    return found


def named_build(text: str) -> Any:
    given = named(text, BUILD)
    if callable(given) or hasattr(given, "build"):
        return given
    raise ValueError(
        f"`{BUILD}` must name a compiled model or a function that returns one. "
        f"Received: {BUILD} {text}, a {type(given).__name__}."
    )


def named_data(text: str) -> Any:
    """Return the data that a name stands for; a function that wants a batch size stays one."""
    given = named(text, DATA)
    if not callable(given) or hasattr(given, "element_spec"):
        return given
    parameters = inspect.signature(given).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return given if required else given()


def named_x_y(text: str) -> tuple[Any, Any]:
    data = named_data(text)
    if not isinstance(data, (tuple, list)):
        return data, None
    if len(data) != 2:
        raise ValueError(
            f"`{DATA}` must give (x, y), a dataset or a function batch_size -> dataset. "
            f"Received: {DATA} {text}, which gives {len(data)} values."
        )
    return data[0], data[1]


def split_name(text: str, option: str) -> tuple[str, str]:
    """Split a name whose package exists, and let Python find its module; nothing is imported."""
    module_name, _, name = text.partition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)
        folder, module_name = str(path.parent.resolve()), path.stem
    else:
        folder = str(Path.cwd())
    if not name or not module_name:
        raise ValueError(
            f"`{option}` must be package.module:function, such as train:build. "
            f"Received: {option} {text}."
        )
    package = module_name.partition(".")[0]
    if package in {*sys.stdlib_module_names, "test"}:
        raise ValueError(
            f"`{option}` names a module of Python's standard library, which is found first: rename "
            f"{package}.py. Received: {option} {text}."
        )
    if folder not in sys.path:
        # A `pickle.py` there must not hide Python's own.
        installed = (i for i, entry in enumerate(sys.path) if entry.endswith("-packages"))
        sys.path.insert(next(installed, len(sys.path)), folder)
    if importlib.util.find_spec(package) is None:
        raise _not_found(text, option)
    return module_name, name


def _not_found(text: str, option: str) -> ValueError:
    given = Path(text.partition(":")[0])
    folder = given.parent.resolve() if given.suffix == ".py" else Path.cwd()
    return ValueError(
        f"`{option}` names a module that is not found from {folder}: run the command in the "
        f"folder that holds it. Received: {option} {text}."
    )


def integers(text: str, *, example: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"`--batch-sizes` must be integers with commas between them, such as {example}. "
            f"Received: --batch-sizes {text}."
        ) from error


def starting_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Say that TensorFlow starts, which takes seconds, and hold back what it writes then."""
    print("Starting TensorFlow ...", flush=True)
    return quiet_start()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back what native code writes to stderr while TensorFlow is imported.

    TensorFlow writes some lines before its own log level, `TF_CPP_MIN_LOG_LEVEL`, applies. That is
    set too, unless it is set already. After an error all lines are shown.

    Example:

    >>> with kbatch.quiet_start():
    ...     import tensorflow as tf
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
