"""Check the arguments of `BatchSizeTuner`, choose its batch sizes, and shorten tracebacks."""

import functools
import math
import numbers
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size, powers_of_two
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.device.failures import OF_PYTHON
from kbatch.errors import InputError, InputTypeError
from kbatch.library_internals import is_oracle_elsewhere
from kbatch.records.json_codec import check_local
from kbatch.records.notes import GridReason
from kbatch.records.training_run import RECORD_NAME, TIMES
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.training.build_function import has_stock_fit
from kbatch.training.callbacks import StopAtTarget
from kbatch.training.data.forms import gives_batches
from kbatch.training.data.training_data import FitCall, TrainingData

Method = TypeVar("Method", bound=Callable[..., Any])

# The default batch sizes: the smallest one, the largest one, and the fewest batches of an epoch.
SMALLEST, LARGEST, FEWEST_BATCHES = 16, 1024, 8


def hypermodel_of(build: Any, batch_sizes: Iterable[int] | None) -> BatchSizeHyperModel | None:
    """Return a hypermodel for one search, or None if `search` will choose its batch sizes."""
    if not isinstance(build, BatchSizeHyperModel):
        return None if batch_sizes is None else BatchSizeHyperModel(build, batch_sizes)
    if batch_sizes is not None:
        raise InputError(
            "A `BatchSizeHyperModel` has its own `batch_sizes`: leave them out of "
            f"`BatchSizeTuner`. Received: batch_sizes={batch_sizes!r}, and a hypermodel with "
            f"{build.batch_sizes}."
        )
    return build.for_search()


def _reason_for_grid(objective: Any, build: keras_tuner.HyperModel) -> GridReason | None:
    """Return a code for why a search cannot be a race, or None if it can be one."""
    if objective is None:
        if has_stock_fit(build):
            raise InputError(
                "`objective` can be None only if your own `HyperModel.fit` returns the number to "
                'minimize: give the name of a metric, such as "val_loss". Received: objective=None.'
            )
        return "returned_number"
    if isinstance(objective, (list, tuple)):
        return "several_objectives"
    if getattr(objective, "name", objective) in TIMES:
        return "time"
    return None if has_stock_fit(build) else "own_fit"


def settings_of_strategy(
    strategy: Any,
    objective: Any,
    build: keras_tuner.HyperModel,
    *,
    executions_per_trial: int,
    confidence: float,
    **optional: Any,
) -> dict[str, Any]:
    """Check the strategy and the arguments that limit it. Return the settings that are not None."""
    grid_because = _reason_for_grid(objective, build)
    if strategy not in ("grid", "race"):
        raise ValueError(f'`strategy` must be "race" or "grid". Received: strategy={strategy!r}.')
    if is_oracle_elsewhere():
        raise ValueError(
            "`BatchSizeTuner` does not use keras-tuner's chief and workers: unset their "
            "environment variables, run the script once, and give `executor=` to run trials at "
            "the same time. Received: "
            f"KERASTUNER_ORACLE_IP={os.environ.get('KERASTUNER_ORACLE_IP')}."
        )
    if (asked := optional["search_learning_rate"]) not in (None, True, False):
        wrong = f"search_learning_rate={asked!r}"
        raise InputError(f"`search_learning_rate` must be True, False or None. Received: {wrong}.")
    if asked and strategy == "grid":
        raise InputError(
            "A grid does not search for the learning rate: leave out `search_learning_rate`, or "
            'give `strategy="race"`. Received: search_learning_rate=True, strategy="grid".'
        )
    for name in ("time_budget_s", "max_trainings"):
        value = optional[name]
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < float(value) < math.inf):
            raise InputError(f"`{name}` must be a positive number. Received: {name}={value!r}.")
    if optional["max_trainings"] is not None and strategy == "grid":
        raise InputError(
            '`max_trainings` limits a race only: give `strategy="race"`, or set '
            "`executions_per_trial` for a grid. "
            f'Received: max_trainings={optional["max_trainings"]}, strategy="grid".'
        )
    races = strategy == "race" and grid_because is None
    if races and executions_per_trial != 1:
        raise ValueError(
            "A race decides how often each trial trains: leave out `executions_per_trial` and set "
            '`max_trainings` to limit the search, or give `strategy="grid"`. '
            f"Received: executions_per_trial={executions_per_trial}."
        )
    settings = {
        "strategy": "race" if races else "grid",
        "grid_because": grid_because if strategy == "race" else None,
        "confidence": confidence,
    }
    return {name: value for name, value in (settings | optional).items() if value is not None}


def check_call(call: FitCall, *, stock_fit: bool, races: bool) -> None:
    """Refuse arguments of `search` that no trial could use."""
    if tf.distribute.has_strategy():
        # keras-tuner clears Keras's session before each trial, which ends the scope silently.
        raise InputError(
            "`search` must be called outside of `strategy.scope()`: give "
            "`distribution_strategy=strategy` to `BatchSizeTuner`. Received: "
            f"strategy={type(tf.distribute.get_strategy()).__name__}."
        )
    if stock_fit and (size := call.named["batch_size"]) is not None:
        raise InputError(
            "The search sets `batch_size` itself: leave it out of `search`, and give the sizes to "
            f"try as `batch_sizes` of `BatchSizeTuner`. Received: batch_size={size}."
        )
    if not all(isinstance(item, keras.callbacks.Callback) for item in call.callbacks):
        raise InputTypeError(
            "`callbacks` must be a `keras.callbacks.Callback` or a list of them. Received: "
            f"callbacks={call.named['callbacks']!r}."
        )
    if races and any(isinstance(item, StopAtTarget) for item in call.callbacks):
        raise InputError(
            "`StopAtTarget` ends all training runs at the same value of the metric, so a race has "
            'nothing to compare: leave out `StopAtTarget`, or give `strategy="grid"` and '
            f'`objective="seconds_to_target"`. Received: callbacks={call.named["callbacks"]!r}.'
        )


def check_without_rates(names: Sequence[str], study_settings: Mapping[str, Any]) -> None:
    """Check that no earlier call of `search` tuned the learning rate, because this one does not."""
    if FACTOR_NAME in names:
        raise InputError(
            "The race in the project directory searched for the learning rate, but this search "
            'does not: use `strategy="race"` without `search_learning_rate=False`, or give '
            f"`overwrite=True` to start over. Received: strategy={study_settings['strategy']!r}, "
            f"search_learning_rate={study_settings.get('search_learning_rate')!r}."
        )


def check_executor(executor: Any, max_parallel: Any, distribution_strategy: Any) -> None:
    """Raise an error if these arguments of `BatchSizeTuner` cannot be used."""
    can_submit = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
    is_local = isinstance(executor, str) and executor == "local"
    if not (executor is None or can_submit or is_local):
        raise ValueError(
            '`executor` must be "local", or an object with `submit(function, *arguments)`, such as '
            "`concurrent.futures.ProcessPoolExecutor(4)`, `submitit.AutoExecutor(folder)`, Dask's "
            f"`Client` or `kbatch.ray_executor()`. Received: executor={executor!r}."
        )
    if executor is not None and distribution_strategy is not None:
        raise ValueError(
            "A `distribution_strategy` uses the devices of this process, and an `executor` trains "
            "in other processes: leave out one of them. "
            f"Received: executor={executor!r}, distribution_strategy={distribution_strategy!r}."
        )
    if max_parallel is not None:
        check_size(max_parallel, "max_parallel", unit="")
        if executor is None:
            raise ValueError(
                "`max_parallel` limits the trials of an executor: give an executor, such as "
                f'`executor="local"`. Received: max_parallel={max_parallel}, executor=None.'
            )


def check_directory(
    directory: str | Path | None, project_name: str | None, *, overwrite: bool
) -> Path:
    """Make the project directory and return its absolute path."""
    folder = Path(directory or ".", project_name or "search")
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A search that has ended can be read from a read-only disk.
        is_recorded = (folder / RECORD_NAME).exists() and not overwrite
        if not is_recorded and not os.access(folder, os.W_OK):
            raise PermissionError("the folder is not writable")
    except OSError as error:
        raise ValueError(
            "`directory` must be a folder in which the search can write: give another "
            f"`directory` or `project_name`. Received: directory={str(directory)!r}, "
            f"project_name={project_name!r} ({error.strerror or error})."
        ) from error
    return folder.absolute()


def default_batch_sizes(
    build: keras_tuner.HyperModel, data: TrainingData, *, parallel: bool
) -> tuple[int, ...]:
    """Return the powers of two from 16 to 1,024 with at least eight batches in an epoch."""
    examples = None
    # Making a dataset takes the GPU, which the processes of an executor need.
    if not (parallel and gives_batches(data.x)):
        examples = data.count_examples(
            lambda: BatchSizeHyperModel(build, (SMALLEST,)).build(keras_tuner.HyperParameters()),
            SMALLEST,
        )
    if examples is None:
        raise InputError(
            "The number of training examples is unknown before training: give `batch_sizes`, "
            "such as `kbatch.powers_of_two(16, 1024)`, or set the length of the dataset with "
            "`tf.data.experimental.assert_cardinality`. "
            f"Received: batch_sizes=None, x of type {type(data.x).__name__}."
        )
    if examples < FEWEST_BATCHES * SMALLEST:
        raise InputError(
            f"The default batch sizes need at least {FEWEST_BATCHES * SMALLEST} training examples: "
            f"give `batch_sizes`. Received: batch_sizes=None, {examples} examples."
        )
    return powers_of_two(SMALLEST, min(LARGEST, examples // FEWEST_BATCHES))


def as_public_method(method: Method) -> Method:
    """Restore the global dtype policy after a method, and shorten the tracebacks of its errors.

    keras-tuner clears Keras's session, which resets the policy. Tracebacks lose the frames of
    libraries, unless `keras.config.disable_traceback_filtering` was called.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        policy = keras.config.dtype_policy()
        try:
            return method(*args, **kwargs)
        except Exception as error:  # Any error is raised again, with a shorter traceback.
            if keras.config.is_traceback_filtering_enabled():
                _drop_library_frames(error)
            raise
        finally:
            keras.config.set_dtype_policy(policy)

    return cast(Method, call)


def _drop_library_frames(error: BaseException) -> None:
    """Leave library frames out of a traceback, and causes that have no other frames."""
    names = ("kbatch", "keras", "keras_tuner", "optree", "tensorflow")
    files = [sys.modules[name].__file__ or "" for name in names if name in sys.modules]
    folders = tuple(os.path.dirname(file) + os.sep for file in files)
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    shortened = None
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(folders):
            shortened = types.TracebackType(
                shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno
            )
    error.__traceback__ = shortened
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        _drop_library_frames(cause)
        if cause.__traceback__ is None and OF_PYTHON not in str(cause):
            error.__cause__, error.__suppress_context__ = None, True
