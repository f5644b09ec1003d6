"""Trials in processes of their own: what they take is given back when they end."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import tensorflow as tf

from kbatch.device.device_memory import worker_device
from kbatch.device.mapped_pickles import MappedPickles, UnsendableError
from kbatch.device.worker import Worker
from kbatch.errors import InputError
from kbatch.search.executions import run_executions
from kbatch.search.throughput_sweep import sweep_throughput
from kbatch.study.goodput import GoodputRecord


class IsolatedTrials:
    """Runs each trial of a search in a fresh process, with the data of the search mapped.

    The tuner travels by value: its copy trains, and what it reports comes back. TensorFlow's
    graphs and the memory of a GPU go with the process.

    Args:
        arguments: Positional arguments of the search.
        keywords: Its keyword arguments.

    Raises:
        InputError: If they cannot travel to another process, with what to give.
    """

    def __init__(self, arguments: Sequence[Any], keywords: Mapping[str, Any]):
        _refuse_datasets(arguments, keywords)
        self._worker = Worker(worker_device())
        # A folder of its own: the worker's pickles replace one another.
        folder = self._worker.folder / "search"
        folder.mkdir()
        try:
            self._data = MappedPickles(folder).dumps((tuple(arguments), dict(keywords)))
        except UnsendableError as error:
            self._worker.close()
            raise InputError(
                "With `isolate=True` data and callbacks travel to another process: give arrays or "
                f"a function `batch_size -> tf.data.Dataset`. Received: {error}"
            ) from error
        except BaseException:
            self._worker.close()
            raise

    def __enter__(self) -> "IsolatedTrials":
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()

    def run(self, tuner: Any, trial: Any, on_event: Callable[[Any], None]) -> Any:
        """Runs the executions of a trial.

        Args:
            tuner: The tuner, whose copy trains.
            trial: The trial.
            on_event: Receives how far training is.

        Returns:
            The hyperparameters of the trial, with those that its training declared.

        Raises:
            WorkerDied: If the process ended before the trial did.
            Exception: What the trial raised.
        """
        try:
            return self._worker.call(_run, tuner, trial, self._data, on_event=on_event)
        finally:
            self._worker.restart()

    def sweep(self, tuner: Any) -> GoodputRecord:
        """Times an update of each batch size, in a process that ends with it.

        Args:
            tuner: The tuner, whose copy builds the model.
        """
        try:
            return self._worker.call(_sweep, tuner, self._data)
        finally:
            self._worker.restart()


def explored_space(tuner: Any) -> tuple[keras_tuner.HyperParameters, Any]:
    """Finds the search space in another process, so that this one never takes the device.

    Args:
        tuner: The tuner, whose copy's `explore` builds the models.

    Returns:
        The space, and what `explore` returned.
    """
    with Worker(worker_device()) as worker:
        return worker.call(_explore, tuner)


def _run(tell: Callable[[Any], None], tuner: Any, trial: Any, data: bytes) -> Any:
    arguments, keywords = pickle.loads(data)
    run_executions(tell, tuner, trial, arguments, keywords)
    return trial.hyperparameters


def _sweep(tuner: Any, data: bytes) -> GoodputRecord:
    arguments, keywords = pickle.loads(data)
    space = tuner.oracle.get_space()
    return sweep_throughput(
        tuner.hypermodel,
        space,
        arguments=arguments,
        keywords=keywords,
        directory=Path(tuner.project_dir),
    )


def _explore(tuner: Any) -> Any:
    explored = tuner.explore()
    return tuner.oracle.get_space(), explored


def _refuse_datasets(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    values = keras.tree.flatten([list(arguments), dict(keywords)])
    if any(isinstance(value, tf.data.Dataset) for value in values):
        raise InputError(
            "With `isolate=True` a dataset cannot travel to another process: give a function "
            "`batch_size -> tf.data.Dataset` that makes it there, or arrays. "
            "Received: a tf.data.Dataset."
        )
