"""The callbacks of a trial: fresh copies, and files of their own."""

import copy
from pathlib import Path
from typing import Any

import keras

from kbatch.errors import InputError
from kbatch.records.notes import RunNote


class FreshCallbacks:
    """Keeps copies of callbacks as they come, and gives those once training starts again.

    A checkpoint's best value or a user's counts would else go on from the attempt that failed.
    Callbacks of keras-tuner and of kbatch's search stay themselves: others hold them. One that
    cannot be copied stays itself too. What a callback keeps in files is as the attempt left it.
    """

    def __init__(self):
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._given: dict[int, Any] | None = None

    def start_again(self) -> None:
        """Begin another attempt."""
        self._given = {}

    def of(self, callbacks: list[Any], model: keras.Model) -> list[Any]:
        """Return the callbacks of a `fit`: themselves first, then copies from before training."""
        new = [c for c in callbacks if id(c) not in self._kept and not _of_search(c)]
        # They may refer to one another.
        stay = {id(model): model} | {id(c): c for c in callbacks if _of_search(c)}
        for callback, copied in zip(new, _copied(new, stay), strict=True):
            self._kept[id(callback)] = (callback, copied)
        if self._given is None:
            return callbacks
        missing = [id(c) for c in callbacks if id(c) in self._kept and id(c) not in self._given]
        copies = _copied([self._kept[number][1] for number in missing], stay)
        self._given.update(zip(missing, copies, strict=True))
        return [self._given.get(id(callback), callback) for callback in callbacks]


def _copied(callbacks: list[Any], stay: dict[int, Any]) -> list[Any]:
    try:
        return copy.deepcopy(callbacks, dict(stay))
    except Exception:  # Whatever a user's class raises: a lock, a file, a process.
        if len(callbacks) == 1:
            return callbacks
    return [_copied([callback], stay)[0] for callback in callbacks]


def _of_search(callback: Any) -> bool:
    module = type(callback).__module__
    known = module.partition(".")[0] == "keras_tuner" or module.startswith("kbatch.search.")
    return known or hasattr(callback, "tuner") or hasattr(callback, "trial")


# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))


def give_own_paths(callbacks: Any, *, trial_id: str, execution: int) -> tuple[RunNote, ...]:
    """Let callbacks write to a folder of their execution, as keras-tuner does with TensorBoard.

    Else every trial writes over the file of the one before, and the last one's model is taken for
    the best one's.
    """
    notes = []
    for callback in keras.tree.flatten(callbacks or []):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InputError(
                "A search goes on by itself after an interruption, and a backup would begin a "
                "trial in the state of another one: leave out `BackupAndRestore`. Received: "
                f"a {type(callback).__name__} among `callbacks`."
            )
        for kind, name in _PATHS:
            if isinstance(callback, kind):
                given = Path(getattr(callback, name))
                own = given.parent / trial_id / f"execution{execution}" / given.name
                own.parent.mkdir(parents=True, exist_ok=True)
                setattr(callback, name, str(own))
                places = given.parent / "<trial id>" / "execution<number>" / given.name
                notes.append(
                    RunNote.of(
                        "own_path",
                        callback=type(callback).__name__,
                        own=str(places),
                        given=str(given),
                    )
                )
    return tuple(dict.fromkeys(notes))
