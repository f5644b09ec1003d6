"""Versioned JSON files of frozen records, which a reader sees whole."""

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
# Squares of larger numbers overflow: like infinity, such a number says that something diverged.
LARGEST_NUMBER = 1e100
_LONGEST_SHOWN = 200

# What a constructor or a decoder raises where a file holds something else.
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# A path of other storage, whose two slashes `Path` makes one of; a drive of Windows has one letter.
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Record = typing.TypeVar("Record")


def write_record(record: object, path: Path) -> None:
    """Write a record so that a reader sees the old file or the new one, never half of it."""
    write_whole_file(path, (record_text(record) + "\n").encode())


def record_text(record: object) -> str:
    """Write a record as the JSON text that `write_record` puts into a file."""
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
        version, found = document["kbatch_schema"], document["kind"]
        if (version, found) == (SCHEMA_VERSION, kind.__name__):
            return decode(kind, document["record"])
    except DAMAGED as error:
        raise RecordError(f"{name} is no kbatch record or is damaged: {shown(error)}.") from error
    if version == SCHEMA_VERSION:
        raise RecordError(f"{name} holds a {shown(found, str)}, not a {kind.__name__}.")
    raise RecordError(
        f"{name} has schema version {shown(version)}, this kbatch reads {SCHEMA_VERSION}: use the "
        "version of kbatch that wrote it, or measure again into another file or folder."
    )


def check_local(path: str | Path) -> None:
    """Refuse what is no local path: a folder named after its scheme would be made."""
    if _ELSEWHERE.match(str(path)):
        raise InputError(
            "kbatch reads and writes local files only: give a local path, and copy from or to "
            f"other storage yourself. Received: {str(path)!r}."
        )


def read_json(path: Path) -> typing.Any:
    """Read a JSON file that anybody may have written."""
    check_local(path)
    name = printable(str(path))
    # A pipe or a device in its place would never end.
    if path.exists() and not path.is_file():
        raise RecordError(f"{name} is no kbatch record: it is no regular file.")
    try:
        return json.loads(path.read_bytes().decode())
    except (OSError, RecursionError, ValueError) as error:
        raise RecordError(f"{name} is no kbatch record or is damaged: {shown(error)}.") from error


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Write a value of a file for a message, which a hostile one could fill with pages."""
    text = printable(write(value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def load_if_readable(kind: type[Record], path: Path | None) -> Record | None:
    """Read a record that can be made again; None where there is none, or it cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        return read_record(kind, path)
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
    to_json: typing.Any = getattr(value, "to_json", None)
    return value if to_json is None else to_json()


def decode(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Check what a file holds, and make a value of this kind of it."""
    return _decoder(kind)(value)


# Files hold many values of few kinds: how a kind is read is found out once.
@functools.cache
def _decoder(kind: typing.Any) -> Callable[[typing.Any], typing.Any]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind(**{name: fields[name](item) for name, item in value.items()})
    if hasattr(kind, "from_json"):
        parts = {name: _decoder(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind.from_json(**{n: read(value[n]) for n, read in parts.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # Of several all are plain, such as the values of hyperparameters.
        *more, last = (one for one in arguments if one is not types.NoneType)

        def decode_one(value: typing.Any) -> typing.Any:
            if value is None and types.NoneType in arguments:
                return None
            return _decoder(next((one for one in more if _is_plain(one, value)), last))(value)

        return decode_one
    if origin is typing.Literal:
        return lambda code: arguments[arguments.index(code)]
    if origin is tuple:
        item_of = _decoder(arguments[0])
        return lambda value: tuple([item_of(item) for item in _plain(list, value)])
    if origin is not None:
        item_of = _decoder(arguments[1])
        return lambda value: {
            printable(key): item_of(item) for key, item in _plain(dict, value).items()
        }
    if kind in (int, float):
        # A study has a million of them: most need no further look.
        return lambda value: (
            value
            if type(value) is kind and -LARGEST_NUMBER <= value <= LARGEST_NUMBER
            else _plain(kind, value)
        )
    return functools.partial(_plain, kind)


def _plain(kind: typing.Any, value: typing.Any) -> typing.Any:
    """Check a value that is no record: text that can be shown, numbers to compute with."""
    if not _is_plain(kind, value):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, str):
        return printable(value)
    if kind is object and isinstance(value, list):  # A setting, of any kind.
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
    """Write a file in one step: an error leaves what was there before."""
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
        raise OSError(
            error.errno,
            f"kbatch cannot write here ({error.strerror}): give a writable directory",
            path,
        ) from error
