"""Files that callbacks write: a folder of its own for each execution of a search."""

from pathlib import Path
from typing import Any

import keras

from kbatch.errors import InputError

# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))


def give_own_paths(callbacks: Any, *, trial_id: str, execution: int) -> tuple[str, ...]:
    """Let callbacks write to a folder of their execution, as keras-tuner does with TensorBoard.

    Else every trial writes over the file of the one before, and the last one's model is taken for
    the best one's.

    Args:
        callbacks: The callbacks of an execution, which are its own copies; they are changed.
        trial_id: keras-tuner's identifier of the trial.
        execution: Number of the execution, from 0.

    Returns:
        What a reader must know, the same in every trial.

    Raises:
        InputError: If one would begin training in the state of another trial.
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
                notes.append(
                    f"`{type(callback).__name__}` writes a file for each trial: "
                    f"{given.parent / '<trial id>' / 'execution<number>' / given.name} in place of "
                    f"{given}."
                )
    return tuple(dict.fromkeys(notes))
