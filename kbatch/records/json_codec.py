"""Versioned JSON files of frozen dataclasses. A reader never sees a half-written file."""

import dataclasses
import functools
import json
import os
import re
import threading
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

from kbatch.errors import InputError, RecordError
from kbatch.records.notes import printable

SCHEMA_VERSION = 1
# Sums of squares of larger numbers would overflow. A larger number means that training diverged.
LARGEST_NUMBER = 1e100
_LONGEST_SHOWN = 200
# Errors that a constructor or a decoder may raise if a file does not hold what it should.
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# The scheme of a URL, such as "gs:/": `Path` merges its two slashes. A drive has one letter.
_URL_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Record = typing.TypeVar("Record")


def write_record(record: object, path: Path) -> None:
    """Write a record to a file. A reader sees the old file or the new one, never a part."""
    write_whole_file(path, (record_text(record) + "\n").encode())


def record_text(record: object) -> str:
    """Return the JSON text of a record."""
    document = {
        "kbatch_schema": SCHEMA_VERSION,
        "kind": type(record).__name__,
        "record": _encode(record),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def read_record(kind: type[Record], path: Path) -> Record:
    """Read a record that `write_record` wrote."""
    document, name = read_json(path), printable(str(path))
    try:
        version, label = document["kbatch_schema"], shown(document["kind"], str)
        if (version, label) == (SCHEMA_VERSION, kind.__name__):
            return decode(kind, document["record"])
    except DAMAGED as error:  # Only the text of a `ValueError` helps a user.
        raise damaged(name, error if type(error) is ValueError else "") from error
    if version == SCHEMA_VERSION:
        raise RecordError(f"{name} has record type {label}, not {kind.__name__}: use another file.")
    raise RecordError(
        f"{name} has schema version {shown(version)}, not {SCHEMA_VERSION}: install the version of "
        "kbatch that wrote it, or measure again and write to another file or folder."
    )


def damaged(name: str, reason: object = "") -> RecordError:
    because = f": {shown(reason, str).removesuffix('.')}" if reason else ""
    return RecordError(f"{name} is damaged, or kbatch did not write it{because}.")


def check_local(path: str | Path) -> None:
    """Raise an `InputError` for a URL. `Path("gs://a")` would be a local folder named `gs:`."""
    if _URL_SCHEME.match(str(path)):
        raise InputError(f"A path must be local, not a URL. Received: {str(path)!r}.")


def read_json(path: Path) -> typing.Any:
    """Read a JSON file. Raise a `RecordError` if it is damaged or not a regular file."""
    check_local(path)
    name = printable(str(path))
    if path.exists() and not path.is_file():  # Reading a pipe or a device may never end.
        raise RecordError(f"{name} must be a regular file, not a folder, device or pipe.")
    try:
        return json.loads(path.read_bytes().decode())
    except OSError as error:
        raise RecordError(f"{name} cannot be read: {error.strerror}.") from error
    except (RecursionError, ValueError) as error:
        raise damaged(name, error) from error


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Return a value as text for a message, with at most 200 characters."""
    is_long = len(text := printable(write(value))) > _LONGEST_SHOWN
    return f"{text[:_LONGEST_SHOWN]}..." if is_long else text


def load_if_readable(kind: type[Record], path: Path | None) -> Record | None:
    """Read a record. If there is none or it cannot be read, return None."""
    try:
        return read_record(kind, path) if path is not None and path.exists() else None
    except RecordError:
        return None


def _encode(value: object) -> object:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _encode(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
        return None
    return typing.cast(typing.Any, value).to_json() if hasattr(value, "to_json") else value


def decode(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Check a value from a JSON file, and convert it to a type such as a record or `int | None`."""
    return _decoder(kind)(value)


@functools.cache  # A file has many values of few kinds.
def _decoder(kind: typing.Any) -> Callable[[typing.Any], typing.Any]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind(**{name: fields[name](item) for name, item in value.items()})
    if hasattr(kind, "from_json"):
        parts = {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind.from_json(**{n: read(value[n]) for n, read in parts.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # Only unions of plain types have more than one type besides None.
        *more, last = (part for part in arguments if part is not types.NoneType)

        def decode_union(value: typing.Any) -> typing.Any:
            if value is None and types.NoneType in arguments:
                return None
            return _decoder(next((part for part in more if _is_plain(part, value)), last))(value)

        return decode_union
    if origin is typing.Literal:
        return lambda code: arguments[arguments.index(code)]
    if origin is tuple:
        item_of = _decoder(arguments[0])
        return lambda value: tuple([item_of(item) for item in _plain(list, value)])
    if origin is not None:
        item_of = _decoder(arguments[1])
        return lambda value: {printable(k): item_of(v) for k, v in _plain(dict, value).items()}
    if kind in (int, float):
        # A study may have a million numbers, so the usual case is checked first.
        return lambda value: (
            value
            if type(value) is kind and -LARGEST_NUMBER <= value <= LARGEST_NUMBER
            else _plain(kind, value)
        )
    return functools.partial(_plain, kind)


def _plain(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Check a value that is not a record. Make texts printable, and refuse infinite numbers."""
    if not _is_plain(kind, value):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if isinstance(value, str):
        return printable(value)
    if kind is object and isinstance(value, list):  # Only settings of a search have this kind.
        return [_plain(object, item) for item in value]
    if kind is object and isinstance(value, dict):
        return {printable(key): _plain(object, item) for key, item in value.items()}
    if isinstance(value, (int, float)) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise ValueError(f"{value} is not finite, or too large to compute with")
    return value


def _is_plain(kind: typing.Any, value: typing.Any) -> bool:
    if isinstance(value, bool) and kind is not object:
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def write_whole_file(path: Path, data: bytes) -> None:
    """Write a file in one step. If that fails, the old file stays."""
    check_local(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        text = f"kbatch cannot write here ({error.strerror}): give a writable directory"
        raise OSError(error.errno, text, path) from error
