"""Messages of any length over a pipe."""

import struct
from typing import IO, Any

_LENGTH = struct.Struct(">Q")


def write_message(pipe: IO[bytes] | Any, message: bytes) -> None:
    """Writes a message with its length before it."""
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes] | Any) -> bytes:
    """Reads a message.

    Raises:
        EOFError: If the other end closed before it was whole.
    """
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size))
    return _read(pipe, length)


def _read(pipe: IO[bytes] | Any, length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError("The other end of the pipe is closed.")
    return data
