"""A script run as the chief or as a worker of a distributed search, unchanged.

keras-tuner's environment variables make the roles. What they get wrong is mended in the one class
through which every tuner goes: a worker would delete the project under `overwrite=True`, ask
without pause while it is idle, and go on after `search` with a chief that has ended.
"""

import contextlib
import functools
import inspect
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kbatch.search.after_import import after_import
from kbatch.search.chief_address import ChiefAddress

_PARENT_CHECK_S = 0.5
_CHIEF_CHECK_S = 0.5
_IDLE_S = 0.5


def main() -> None:
    """Runs `sys.argv[2]` with the words after it, for the process whose id is `sys.argv[1]`."""
    parent, script, *words = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    # The script may set variables before it imports TensorFlow: nothing is imported for it.
    after_import("keras_tuner.src.engine.base_tuner", _adapt_tuner)
    after_import("keras_tuner.src.distribute.oracle_client", _adapt_client)
    after_import("keras_tuner.src.distribute.oracle_chief", _adapt_chief)
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
    else:
        tuner.__init__ = _after_the_chief(tuner.__init__)
        tuner.search = _to_the_end(tuner.search)


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


def _to_the_end(search: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(search)
    def to_the_end(tuner: Any, *args: Any, **kwargs: Any) -> None:
        search(tuner, *args, **kwargs)
        # What follows in the script asks for results, which the chief alone has.
        sys.exit(0)

    return to_the_end


def _adapt_client(module: ModuleType) -> None:
    client: Any = vars(module)["OracleClient"]
    client.create_trial = _with_pauses(client.create_trial)


def _adapt_chief(module: ModuleType) -> None:
    give_lock_back(vars(module)["OracleServicer"])


def give_lock_back(servicer: Any) -> None:
    """Change a class of keras-tuner's servicers: a call that fails gives the oracle's lock back.

    keras-tuner keeps it, and the chief, which takes it to see whether it may end, waits for ever.
    """
    for name in ("CreateTrial", "UpdateTrial", "EndTrial", "UpdateSpace"):
        setattr(servicer, name, _giving_back(getattr(servicer, name)))


def _giving_back(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def giving_back(servicer: Any, *args: Any) -> Any:
        from keras_tuner.src.engine.oracle import LOCKS, THREADS

        try:
            return call(servicer, *args)
        except BaseException:
            if THREADS[servicer.oracle] == threading.current_thread().name:
                THREADS[servicer.oracle] = None
                LOCKS[servicer.oracle].release()
            raise

    return giving_back


def _with_pauses(create_trial: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_trial)
    def with_pauses(*args: Any, **kwargs: Any) -> Any:
        trial = create_trial(*args, **kwargs)
        if trial.status == "IDLE":
            time.sleep(_IDLE_S)
        return trial

    return with_pauses
