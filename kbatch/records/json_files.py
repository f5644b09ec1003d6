"""Versioned JSON files of frozen records."""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from kbatch.records.whole_files import write_whole_file

SCHEMA_VERSION = 1

Record = typing.TypeVar("Record")


class RecordError(ValueError):
    """A record that cannot be read or written; the message names the file."""


class NewerRecordError(RecordError):
    """A record of a newer kbatch, which must not be overwritten."""


def write_record(record: object, path: Path) -> None:
    """Writes a record so that a reader sees the old file or the new one, never half of it.

    Args:
        record: A dataclass instance.
        path: File to write; its folder is made if it is missing.

    Raises:
        OSError: If the folder cannot be written, with what to do.
    """
    write_whole_file(path, (record_text(record) + "\n").encode())


def record_text(record: object) -> str:
    """Writes a record as the JSON text that `write_record` puts into a file."""
    document = {
        "kbatch_schema": SCHEMA_VERSION,
        "kind": type(record).__name__,
        "record": _encode(record),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def read_record(kind: type[Record], path: Path) -> Record:
    """Reads a record that `write_record` wrote.

    Args:
        kind: Dataclass of the record.
        path: File to read.

    Returns:
        The record.

    Raises:
        RecordError: If the file is broken, of a newer schema or holds another kind.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["kbatch_schema"]
        found = document["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no kbatch record or is damaged: {error!r}.") from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise NewerRecordError(
            f"{path} has schema version {version}, this kbatch reads up to {SCHEMA_VERSION}: "
            "upgrade kbatch (pip install --upgrade kbatch)."
        )
    if found != kind.__name__:
        raise RecordError(f"{path} holds a {found}, not a {kind.__name__}.")
    try:
        return _decode(kind, document["record"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{path} is damaged, or another version of kbatch wrote it: {error!r}."
        ) from error


def load_if_readable(kind: type[Record], path: Path | None) -> Record | None:
    """Reads a record that can be made again; None where there is none, or it cannot be read."""
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
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@functools.cache
def _type_hints(kind: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(kind)


def _decode(kind: typing.Any, value: typing.Any) -> typing.Any:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _type_hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value)
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if origin is not None:
        return {name: _decode(arguments[1], item) for name, item in value.items()}
    return _plain(kind, value)


def _decode_union(kinds: tuple[typing.Any, ...], value: typing.Any) -> typing.Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) == 1:
        return _decode(others[0], value)
    if any(_is_plain(kind, value) for kind in kinds):
        return value
    raise TypeError(f"{value!r} is none of {kinds}")


def _plain(kind: typing.Any, value: typing.Any) -> typing.Any:
    if kind is not object and not _is_plain(kind, value):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _is_plain(kind: typing.Any, value: typing.Any) -> bool:
    return isinstance(value, (int, float) if kind is float else kind)
