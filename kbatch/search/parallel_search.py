"""A search whose executions are tasks of an executor, several at a time."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import socket
import sys
import tempfile
import time
import uuid
from asyncio import CancelledError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import keras_tuner
from keras_tuner.engine.trial import TrialStatus

from kbatch.device.worker import MappedPickles, WorkerDied
from kbatch.document.numbers import memory_text
from kbatch.errors import InputError
from kbatch.records.json_codec import load_if_readable, write_whole_file
from kbatch.search.executors import LeftResult, LocalExecutor, Task, TaskResult, run_task
from kbatch.search.live_plot import LivePlot
from kbatch.search.resources import MEMORY_NAME, TOO_LARGE, MeasuredMemory, ask_submitit
from kbatch.search.trial_files import (
    CHECKPOINT_NAME,
    STATE_NAME,
    TrialFiles,
    completed_trials,
    same_settings,
)
from kbatch.search.trial_process import check_no_dataset
from kbatch.study.study import RECORD_NAME

# Large arrays of the data, in the project directory while the search runs.
_DATA_FOLDER = ".kbatch-data"
# Where workers leave results until they are written: a folder with a name of its own.
_RESULTS = ".kbatch-results-"
_CHECK_S = 0.05
# Records of other trials that an execution is compared with.
_COMPARED = 3


@dataclasses.dataclass(eq=False)
class _OpenTrial:
    """A trial that was handed out and has not ended."""

    trial: Any
    files: TrialFiles
    completed: int  # Executions, of those that it is to have.
    begun_s: float
    future: Any = None  # Of the present execution.
    lost: int = 0  # How often the engine lost that.
    ran_out: bool = False  # Of memory: it runs once more and asks for twice as much.
    result_file: Path = Path()  # Where a worker leaves its result.


class ParallelTrials:
    """Runs a search's trials as tasks of an executor, and alone writes to the project directory."""

    def __init__(self, tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]):
        check_no_dataset(arguments, keywords, given="executor=...")
        given = keras.tree.flatten(keywords.get("callbacks") or [])
        # The figure of a search is drawn where all trials are.
        travelling = [one for one in given if not isinstance(one, LivePlot)]
        self._given = tuple(arguments), {**keywords, "verbose": 0, "callbacks": travelling}
        self._tuner, self._project = tuner, Path(tuner.project_dir)
        self._say = tuner._progress.say
        executor, max_parallel = tuner._executor, tuner._max_parallel
        self._own = LocalExecutor(max_parallel) if executor == "local" else None
        self._executor: Any = self._own or executor
        self._max_open = max_parallel or (self._own.workers if self._own else sys.maxsize)
        known = getattr(executor, "with_resources", lambda needed: ask_submitit(executor, needed))
        # Makes the executor for what an execution needs, None where nothing is asked for.
        self._ask: Any = known if tuner._resources == "auto" else tuner._resources
        self._memory: MeasuredMemory | None = None
        self._longest_s: float | None = None  # Of the executions that completed here.
        self._search: Any = None  # What travels with each task, or the executor's reference to it.
        self._open: list[_OpenTrial] = []  # Those whose execution was submitted.
        self._first_completed: str | None = None  # The trial that found what decides for others.
        self._mistake: str | None = None  # In what was given: no other trial would fare better.
        self._gone: BaseException | None = None  # What the engine raised where nothing helps.

    def close(self) -> None:
        for one in self._open:
            # An engine may be gone, and a job of an earlier driver is not this one's to cancel.
            with contextlib.suppress(Exception):
                one.future.cancel()
        if self._own is not None:
            self._own.close()
        shutil.rmtree(self._project / _DATA_FOLDER, ignore_errors=True)

    def _result_of(self, what: str, attempt: int = 0, **task: Any) -> TaskResult:
        """Run a task that is no execution of a trial; once more if the engine loses it."""
        future = self._submit(Task(self._files_for(()), attempt=attempt, **task))
        try:
            while not future.done():
                time.sleep(_CHECK_S)
            return future.result()
        except (Exception, CancelledError) as error:  # Whatever the engine raises.
            if attempt:
                raise self._engine_error(f"lost {what} twice", error) from error
            self._say(f"The executor lost {what}, which is submitted again: {error}")
        except BaseException:
            with contextlib.suppress(Exception):
                future.cancel()
            raise
        return self._result_of(what, attempt=1, **task)

    def _measure(self) -> None:
        """Measure the memory of train steps on the engine, unless a search here has done so."""
        file = self._project / MEMORY_NAME
        self._memory = load_if_readable(MeasuredMemory, file)
        if self._memory is not None:
            return
        result = self._result_of("the measurement of memory")
        self._write(result)
        self._memory = load_if_readable(MeasuredMemory, file)
        if self._memory is None:
            reason = result.text.strip().rpartition("\n")[2]
            self._say(f"No resources are asked for, since memory could not be measured: {reason}")

    def run(self) -> None:
        self._search = self._pickle_search()
        if self._ask is not None:
            self._measure()
        # A random name: workers with another disk at this path find no results of another search.
        project = self._project.resolve()
        found = next(project.glob(f"{_RESULTS}*"), None)
        self._results = found or Path(tempfile.mkdtemp(prefix=_RESULTS, dir=project))
        self._tuner.oracle.ongoing_trials.clear()  # Of a search that was interrupted here.
        completed = next(completed_trials(self._project), None)
        self._first_completed = completed and completed.trial_id
        hypermodel = self._tuner.hypermodel
        falls_back = hypermodel.dtype_policies in (("mixed_float16",), ("float16",))
        # The first execution finds what fits, and the policy.
        decides = hypermodel.micro_batch_size == "auto" or falls_back
        while True:
            while len(self._open) < self._max_open:
                if self._open and decides and self._first_completed is None:
                    break
                one = self._open_next_trial()
                if one is None:
                    break
                self._submit_next(one)
            if not self._open:
                shutil.rmtree(self._results, ignore_errors=True)
                return
            running = [_is_running(one.future) for one in self._open]
            self._tuner._progress.show_counts(
                submitted=len(running),
                running=None if None in running else sum(map(bool, running)),
                ended=len(self._tuner.oracle.ended_trials),
            )
            ended = []
            for one in self._open:
                try:
                    if one.future.done():
                        ended.append(one)
                except (Exception, CancelledError) as error:  # Whatever the engine raises.
                    self._gone = error
            if not ended and self._gone is None:
                time.sleep(_CHECK_S)
            # All that has completed is written before more is asked of an executor that may fail.
            self._open = [one for one in self._open if one not in ended]
            again = [one for one in ended if self._record_result(one)]
            if self._mistake is not None:
                raise keras_tuner.errors.FatalValueError(self._mistake)
            if self._gone is not None:
                raise self._engine_error("does not answer", self._gone) from self._gone
            for one in again:
                self._submit_next(one)

    def _open_next_trial(self) -> _OpenTrial | None:
        """Open the next trial; None where there is none, or results decide on it."""
        trial = self._tuner.oracle.create_trial(uuid.uuid4().hex)
        if trial.status != TrialStatus.RUNNING:
            return None
        self._tuner._plan_executions(trial)
        files = TrialFiles(self._tuner, trial)
        completed = len(files.begin_attempt())
        self._tuner.on_trial_begin(trial)
        return _OpenTrial(trial, files, completed, time.monotonic())

    def _submit_next(self, one: _OpenTrial) -> None:
        """Submit the next execution of a trial, or end the trial."""
        number, executions = one.completed + 1, one.files.executions
        if number > executions:
            self._end_trial(one)
            return
        # What is left, as a process sees it that knows of so many executions a trial.
        left = self._tuner.oracle.remaining_trials() * executions / number
        sent = self._files_for(self._trials_to_send(one.trial))
        if (one.files.folder / CHECKPOINT_NAME).exists():  # A mark: its weights stay here.
            sent[f"{one.files.folder.name}/{CHECKPOINT_NAME}"] = b""
        values = json.dumps(one.trial.hyperparameters.values, sort_keys=True, default=str)
        digest = uuid.uuid5(uuid.NAMESPACE_OID, values).hex
        one.result_file = self._results / f"{one.trial.trial_id}-{number}-{digest}"
        one.future = LeftResult(one.result_file)
        hypermodel, hp = self._tuner.hypermodel, one.trial.hyperparameters
        size, given = hp.get("batch_size"), hypermodel.micro_batch_size
        attempt = one.lost + one.ran_out
        if attempt or not one.future.exists:
            task = Task(
                sent,
                one.trial.trial_id,
                executions=number,
                trials_left=left,
                attempt=attempt,
                result_file=str(one.result_file),
            )
            # What the engine lost may have needed more, too.
            asked = {"longest_s": self._longest_s, "times": 2 if attempt else 1}
            try:
                needed = self._memory and self._memory.needed(size, given, **asked)
                one.future = self._submit(task, needed)
            except MemoryError as error:
                one.files.record_failure(hypermodel, hp, error)
                self._end_trial(one)
                return
        elif not one.future.done():
            self._say(
                f"Batch size {size} still runs in a job of an earlier driver: waiting for it."
            )
        self._open.append(one)

    def _record_result(self, one: _OpenTrial) -> bool:
        """Record the result of an execution; return whether the trial continues."""
        files, trial, hypermodel = one.files, one.trial, self._tuner.hypermodel
        try:
            result = one.future.result()
            if not isinstance(result, TaskResult):
                raise TypeError(f"a task returned {type(result).__name__} instead of its result")
        except (Exception, CancelledError) as error:  # Whatever the engine raises.
            one.lost += 1
            what = f"{type(error).__name__}: {error}".strip(" :")
            if one.lost == 1:
                size = f"batch size {trial.hyperparameters.get('batch_size')}"
                again = f"The executor lost an execution of {size}, which is submitted again"
                self._say(f"{again}: {what}")
                return True
            if isinstance(error, ConnectionError):
                self._gone = error
                return False
            gone = RuntimeError(f"The executor lost this execution twice, last by {what}")
            files.record_failure(hypermodel, trial.hyperparameters, gone)
            self._end_trial(one)
            return False
        self._write(result)
        one.result_file.unlink(missing_ok=True)
        if state := result.files.get(f"{files.folder.name}/{STATE_NAME}"):
            config = json.loads(state)["hyperparameters"]
            trial.hyperparameters = keras_tuner.HyperParameters.from_config(config)
        if result.status == "mistake":
            self._mistake = result.text
            return False
        if result.status == "died":
            died = WorkerDied(result.exit_code, result.text)
            files.record_failure(hypermodel, trial.hyperparameters, died)
        record = files.record()
        if record is not None and any(run.status == "completed" for run in record.executions):
            self._first_completed = self._first_completed or trial.trial_id
        if record is not None and self._memory is not None:
            self._longest_s = max(self._longest_s or 0, record.executions[-1].total_s or 0) or None
            if record.status == "out_of_memory" and not (one.lost or one.ran_out):
                one.ran_out = True
                files.begin_attempt()
                size = record.batch_size
                self._say(f"Batch size {size} ran out of memory: asks for twice as much.")
                return True
        one.lost, one.ran_out = 0, False
        one.completed += result.status == "completed"
        if record is not None and record.status == "completed" and one.completed < files.executions:
            self._tuner._trackers.update(self._project)
            return True
        trial.message = result.text if result.status == "failed" else None
        self._end_trial(one, result.host)
        return False

    def _end_trial(self, one: _OpenTrial, host: str = "") -> None:
        self._tuner._show_begun(
            one.trial,
            took_s=time.monotonic() - one.begun_s,
            at_once=len(self._open) + 1,
            where=f" on {host}" if host not in ("", socket.gethostname()) else "",
        )
        self._tuner._conclude(one.trial, one.files)
        self._tuner.on_trial_end(one.trial)

    def _trials_to_send(self, trial: Any) -> list[str]:
        """List the trials whose records an execution reads, its own first."""
        trials = sorted(self._tuner.oracle.trials.items())
        others = [other for trial_id, other in trials if trial_id != trial.trial_id]

        def recorded(other: Any) -> bool:
            record = self._project / f"trial_{other.trial_id}" / RECORD_NAME
            return same_settings(other, trial) and record.exists()

        # Few are looked for on disk, however many trials there are.
        first = itertools.islice(filter(recorded, others), _COMPARED)
        named = [one.trial_id for one in (trial, *first)]
        if self._first_completed is not None:
            named.append(self._first_completed)
        return list(dict.fromkeys(named))

    def _files_for(self, trial_ids: Iterable[str]) -> dict[str, bytes]:
        project, names = self._project, (RECORD_NAME, STATE_NAME)
        found = [*project.glob("kbatch-micro-batches/*.json"), project / RECORD_NAME]
        found += [project / f"trial_{one}" / name for one in trial_ids for name in names]
        return {f.relative_to(project).as_posix(): f.read_bytes() for f in found if f.exists()}

    def _write(self, result: TaskResult) -> None:
        # A trial counts by its record, which is written after its weights.
        for name, content in sorted(result.files.items(), key=lambda file: RECORD_NAME in file[0]):
            path = Path(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(
                    "A task may return only files inside the project directory: use the same "
                    f"version of kbatch on all workers. Received: {name}."
                )
            # The oracle's own, and the environment of the first execution that completed.
            earlier = self._first_completed is not None and name == RECORD_NAME
            if path.name != STATE_NAME and not earlier:
                write_whole_file(self._project / path, content)

    def _submit(self, task: Task, needed: Any = None) -> Any:
        executor: Any = None
        try:
            executor = self._executor if needed is None else self._ask(needed)
            return executor.submit(run_task, self._search, task)
        except Exception as error:  # Whatever the engine raises.
            refused = isinstance(error, MemoryError) or TOO_LARGE.search(str(error))
            if executor is None and not refused and callable(self._tuner._resources):
                raise InputError(
                    "`resources` must return the executor for what an execution needs, or raise "
                    f"MemoryError. Received: {needed}: {type(error).__name__}: {error}"
                ) from error
            if needed is None or not refused:
                raise self._engine_error("accepts no more tasks", error) from error
            gpu = f" and {memory_text(needed.gpu_memory_bytes)} of a GPU" if needed.gpus else ""
            raise MemoryError(
                f"No node has what this execution needs, {memory_text(needed.host_memory_bytes)} "
                f"of host memory{gpu}: leave out this batch size, or give a smaller "
                f"`micro_batch_size`. Received: {error}"
            ) from error

    def _engine_error(self, what: str, error: BaseException) -> RuntimeError:
        kind = type(self._executor)
        return RuntimeError(
            f"The executor {kind.__module__}.{kind.__qualname__} {what}: restart it and run the "
            f"same script again. Nothing that completed is lost: the search in {self._project} "
            f"goes on from there. Received: {type(error).__name__}: {error}"
        )

    def _pickle_search(self) -> Any:
        """Pickle the tuner, without its trials, and the data: once for all tasks."""
        folder = (self._project / _DATA_FOLDER).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        tuner, (arguments, keywords) = self._tuner, self._given
        put = getattr(self._executor, "put", None)
        trials, tuner.oracle.trials = tuner.oracle.trials, {}
        whole = tuner, arguments, keywords
        try:
            pickled = cloudpickle.dumps(whole) if put else MappedPickles(folder).dumps(whole)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # A pickler raises whatever the object's own code raises.
            parts = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            parts |= keywords | {"the hypermodel": tuner.hypermodel}
            names = [name for name, value in parts.items() if not _travels(value)]
            raise InputError(
                "Model, data and callbacks travel to the workers of an executor: give arrays or a "
                "function `batch_size -> tf.data.Dataset`, and let functions open what holds a "
                f"file, a lock or a connection themselves. Received: {' and '.join(names)}: {error}"
            ) from error
        finally:
            tuner.oracle.trials = trials
        try:
            return put(pickled) if put else pickled
        except Exception as error:  # Whatever the engine raises.
            raise self._engine_error("did not accept the data", error) from error


def _is_running(future: Any) -> bool | None:
    try:
        return future.running()
    except Exception:  # Few engines know; one that is gone is found by `done`.
        return None


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # As above.
        return False
    return True
