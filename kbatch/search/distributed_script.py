"""A script run as the chief or as a worker of a distributed search, unchanged.

keras-tuner's environment variables make the roles. What they get wrong is mended in the one class
through which every tuner goes: a worker would delete the project under `overwrite=True`, ask
without pause while it is idle, and go on after `search` with a chief that has ended.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_PARENT_CHECK_S = 0.5
_CHIEF_CHECK_S = 0.5
_IDLE_S = 0.5
_CONNECT_S = 2.0
_SILENCE_S = 30.0


def main() -> None:
    """Run `sys.argv[2]` with the words after it, for the process whose id is `sys.argv[1]`."""
    parent, script, *words = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    # The script may set variables before it imports TensorFlow: nothing is imported for it.
    after_import("keras_tuner.src.engine.base_tuner", _adapt_tuner)
    after_import("keras_tuner.src.distribute.oracle_client", _adapt_client)
    after_import(
        "keras_tuner.src.distribute.oracle_chief",
        lambda module: give_lock_back(vars(module)["OracleServicer"]),
    )
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with contextlib.suppress(KeyboardInterrupt):
        runpy.run_path(script, run_name="__main__")
        return
    print("interrupted")
    sys.exit(130)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _adapt_tuner(module: ModuleType) -> None:
    tuner: Any = vars(module)["BaseTuner"]
    if "chief" in os.environ["KERASTUNER_TUNER_ID"]:
        tuner.search = _only_once(tuner.search)
        return
    search = tuner.search

    @functools.wraps(search)
    def to_the_end(tuner: Any, *args: Any, **kwargs: Any) -> None:
        search(tuner, *args, **kwargs)
        # What follows in the script asks for results, which the chief alone has.
        sys.exit(0)

    tuner.__init__ = _after_the_chief(tuner.__init__)
    tuner.search = to_the_end


def _only_once(search: Callable[..., Any]) -> Callable[..., Any]:
    searches: list[Any] = []

    @functools.wraps(search)
    def once(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if searches:
            raise ValueError(
                "A script that `kbatch distribute` runs searches once, since its workers end with "
                "the search: put the second search into a script of its own. "
                f"Received: a search in {tuner.project_dir} after one in {searches[0]}."
            )
        searches.append(tuner.project_dir)
        return search(tuner, *args, **kwargs)

    return once


def _after_the_chief(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def later(*args: Any, **kwargs: Any) -> None:
        address = ChiefAddress(
            os.environ["KERASTUNER_ORACLE_IP"], int(os.environ["KERASTUNER_ORACLE_PORT"])
        )
        # What the chief deletes or finds in the project directory comes first.
        while not address.answers:
            time.sleep(_CHIEF_CHECK_S)
        call = signature.bind(*args, **kwargs)
        call.arguments["overwrite"] = False
        init(*call.args, **call.kwargs)

    return later


def _adapt_client(module: ModuleType) -> None:
    client: Any = vars(module)["OracleClient"]
    create_trial = client.create_trial

    @functools.wraps(create_trial)
    def with_pauses(*args: Any, **kwargs: Any) -> Any:
        trial = create_trial(*args, **kwargs)
        if trial.status == "IDLE":
            time.sleep(_IDLE_S)
        return trial

    client.create_trial = with_pauses


def give_lock_back(servicer: Any) -> None:
    """Change a class of keras-tuner's servicers: a call that fails gives the oracle's lock back.

    keras-tuner keeps it, and the chief, which takes it to see whether it may end, waits for ever.
    """

    def giving_back(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(servicer: Any, *args: Any) -> Any:
            from kbatch.library_internals import give_oracle_back

            try:
                return call(servicer, *args)
            except BaseException:
                give_oracle_back(servicer.oracle)
                raise

        return called

    for name in ("CreateTrial", "UpdateTrial", "EndTrial", "UpdateSpace"):
        setattr(servicer, name, giving_back(getattr(servicer, name)))


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` right after a module was imported for the first time."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            loader.exec_module = execute_and_change
        return spec


class ChiefAddress(NamedTuple):
    """Where the chief answers: the name or number of its host, and its port."""

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
    """Read an address such as `"10.0.0.1:8000"`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            "An address is a host and a port: write it as `10.0.0.1:8000`. "
            f"Received: address={text!r}."
        )
    return ChiefAddress(host, int(port))


def free_local_address() -> ChiefAddress:
    """Find a port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return ChiefAddress(*listener.getsockname())


class RemoteChief:
    """A chief on another host: dead once `answers()` was true and then no more for a while."""

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
