"""Shared parts of the commands: a parser, types of options, models and data by name."""

import argparse
import contextlib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, so that all errors are printed alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`{self.prog} --help` lists the options)")


def quantity(text: str, units: Mapping[str, float], required: str) -> float:
    """Read a positive number with a unit."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(match[1]) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"it must be {required}. Received: {text}.")
    return value


_BYTES = {"": 1, "b": 1} | {
    f"{unit}{end}": base**power
    for power, unit in enumerate("kmgt", start=1)
    for end, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}


def memory_size(text: str) -> int:
    return int(quantity(text, _BYTES, "a number with a unit, such as 2GiB or 500MB"))


def milliseconds(text: str) -> float:
    """Read a time with its unit, such as 20ms or 0.5s."""
    units_ms = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    return quantity(text, units_ms, "a positive time with its unit, such as 20ms, 500us or 0.1s")


def batch_sizes(text: str) -> tuple[int, ...]:
    from kbatch.analysis.batch_sizes import check_batch_sizes  # Imports NumPy.

    try:
        return check_batch_sizes([int(word) for word in text.split(",")])
    except ValueError as error:
        required = "ascending positive integers with commas between them, such as 1,8,64"
        raise argparse.ArgumentTypeError(f"it must be {required}. Received: {text}.") from error


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def name_text(text: str) -> str:
    """Check that a name's package exists, and add its folder to the path. Imports nothing."""
    module_name, name = _module_and_name(text)
    if not name or not module_name:
        required = "package.module:function, such as train:build"
        raise argparse.ArgumentTypeError(f"it must be {required}. Received: {text}.")
    package = module_name.partition(".")[0]
    if package in {*sys.stdlib_module_names, "test"}:
        raise argparse.ArgumentTypeError(
            f"rename {package}.py, because the standard library has a module of this name. "
            f"Received: {text}."
        )
    path = Path(text.partition(":")[0])
    folder = str(path.parent.resolve() if path.suffix == ".py" else Path.cwd())
    if folder not in sys.path:
        # After the standard library, so that a `pickle.py` there does not hide Python's own.
        installed = (i for i, entry in enumerate(sys.path) if entry.endswith("-packages"))
        sys.path.insert(next(installed, len(sys.path)), folder)
    if importlib.util.find_spec(package) is None:
        raise argparse.ArgumentTypeError(
            f"{folder} has no module {package!r}: run the command in the folder that has it. "
            f"Received: {text}."
        )
    return text


def _module_and_name(text: str) -> tuple[str, str]:
    module_name, _, name = text.partition(":")
    return Path(module_name).stem if module_name.endswith(".py") else module_name, name


def named(text: str) -> Any:
    """Import an object by its name, `package.module:name` or `file.py:name`."""
    module_name, name = _module_and_name(text)
    value: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            names = sorted(n for n, v in vars(value).items() if callable(v) and n[0] != "_")
            raise ValueError(
                f"{module_name} has no function {part}: give one of "
                f"{', '.join(names) or 'its names'}. Received: {text}."
            )
        value = getattr(value, part)
    return value


def named_build(text: str) -> Any:
    build = named(text)
    if callable(build) or hasattr(build, "build"):
        return build
    raise ValueError(
        "MODULE:BUILD must name a function that returns a compiled model, or a "
        f"`keras_tuner.HyperModel`. Received: {text}, a {type(build).__name__}."
    )


def named_data(text: str) -> Any:
    """Return named data. A function is called, unless it takes a batch size."""
    data = named(text)
    if not callable(data) or hasattr(data, "element_spec"):
        return data
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_batch_size = any(
        parameter.default is parameter.empty and parameter.kind in positional
        for parameter in inspect.signature(data).parameters.values()
    )
    return data if takes_batch_size else data()


def named_x_y(text: str) -> tuple[Any, Any]:
    data = named_data(text)
    if not isinstance(data, (tuple, list)):
        return data, None
    if len(data) != 2:
        raise ValueError(
            "Data must be (x, y), a dataset or a function batch_size -> dataset. "
            f"Received: {text}, which gives {len(data)} values."
        )
    return data[0], data[1]


def starting_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Print that TensorFlow starts, which takes seconds, and start it quietly."""
    print("Starting TensorFlow ...", flush=True)
    return quiet_start()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Suppress the lines that native code writes to stderr while TensorFlow is imported.

    TensorFlow writes some lines before its log level `TF_CPP_MIN_LOG_LEVEL` applies. The level is
    set as well, unless it is already set. If the block raises an error, all lines are shown.

    Returns:
        A context manager.

    Example:

    >>> with kbatch.quiet_start():
    ...     import tensorflow as tf
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as suppressed:
        os.dup2(suppressed.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(stderr, 2)
            suppressed.seek(0)
            os.write(2, suppressed.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
