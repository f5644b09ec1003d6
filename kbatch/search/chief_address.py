"""The address at which the chief of a distributed search answers."""

import socket
import time
from collections.abc import Callable
from typing import NamedTuple

_CONNECT_S = 2.0
_SILENCE_S = 30.0


class ChiefAddress(NamedTuple):
    """Where the chief answers.

    Attributes:
        host: Name or number of its host.
        port: Its port.
    """

    host: str
    port: int

    @property
    def answers(self) -> bool:
        """Whether something listens there."""
        try:
            socket.create_connection(self, timeout=_CONNECT_S).close()
        except OSError:
            return False
        return True


def parse_address(text: str) -> ChiefAddress:
    """Reads an address such as `"10.0.0.1:8000"`.

    Raises:
        ValueError: If it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            "An address is a host and a port: write it as `10.0.0.1:8000`. "
            f"Received: address={text!r}."
        )
    return ChiefAddress(host, int(port))


def free_local_address() -> ChiefAddress:
    """Finds a port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return ChiefAddress(*listener.getsockname())


class RemoteChief:
    """A chief on another host: dead once it has answered and then fallen silent.

    Args:
        answers: Tells whether it answers now.
        now: Gives the time, in seconds.
    """

    name = "chief"

    def __init__(self, answers: Callable[[], bool], *, now: Callable[[], float] = time.monotonic):
        self._answers = answers
        self._now = now
        self._heard_s: float | None = None

    @property
    def status(self) -> int | None:
        """None while it may live, 1 half a minute after it was last heard."""
        if self._answers():
            self._heard_s = self._now()
        if self._heard_s is None or self._now() - self._heard_s < _SILENCE_S:
            return None
        return 1
