"""The tuner: a search over batch sizes that people can leave alone."""

import contextlib
import dataclasses
import functools
import gc
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner
from keras_tuner.engine.trial import TrialStatus

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.judge import DEFAULT_CONFIDENCE
from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS, names_rate
from kbatch.analysis.race import expected_trainings
from kbatch.device.failures import device_is_lost, failure_traceback
from kbatch.errors import DeviceLostError, InputError, RecordError
from kbatch.library_internals import kept_kernels, trial_callbacks, tuner_callback
from kbatch.page.numbers import at_most, pluralize
from kbatch.progress import check_verbose
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import (
    PLAN_NAME,
    PROGRESS_NAME,
    RECORD_NAME,
    AskedRun,
    Plan,
    Progress,
)
from kbatch.search import identity, tuner_arguments
from kbatch.search.files import (
    CHECKPOINT_NAME,
    DRAFT_NAME,
    ENDED,
    LOCK_NAME,
    TrialFiles,
    compare_runs,
    compare_search,
    readable_trials,
    recorded_search,
    search_lock,
    write_needed,
    write_progress,
)
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.search.live_plot import LivePlot
from kbatch.search.oracle import BatchSizeOracle, trial_result, write_trial
from kbatch.search.parallel import ParallelTrials, explored_space
from kbatch.search.race import RaceStrategy
from kbatch.search.search_progress import FitReporter, SearchProgress
from kbatch.search.search_time import SearchTime
from kbatch.study.compared_trials import check_tolerance, complete_trainings, is_complete
from kbatch.study.decision import race_task
from kbatch.study.study import Study, load_study
from kbatch.training.build_function import BuildFunction, as_hypermodel, has_stock_fit
from kbatch.training.callbacks import BudgetCallback, StopAtTarget
from kbatch.training.data.training_data import FitCall


class BatchSizeTuner(keras_tuner.Tuner):
    """Search over batch sizes, and lose nothing if the search is stopped or a trial fails.

    After an interruption, run the same script again. Trials that ended are kept. The trial that was
    interrupted continues with its first unfinished training run. If a trial runs out of memory,
    diverges or raises an error, the search records the cause and continues with the next trial.

    Example:

    >>> tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory="results")
    >>> tuner.search(x, y, validation_split=0.2, epochs=10)
    >>> print(tuner.study.decide())

    Args:
        build: A function that returns a compiled model and takes keras-tuner's `hp` or nothing, or
            a `keras_tuner.HyperModel`. To change settings of the trials, a
            `kbatch.BatchSizeHyperModel`.
        objective: Name of a metric, a `keras_tuner.Objective`, or a list of these. If None, the
            search minimises the number that your own `HyperModel.fit` returns.
        batch_sizes: Batch sizes to try, in examples, ascending. Leave it out for a
            `BatchSizeHyperModel`, which has its own. Default: powers of two from 16 to 1,024, as
            long as an epoch has at least eight batches. With the default, the first model is built
            when `search` is called.
        strategy: Which trials to run. `"race"` looks for the learning rate with short runs at
            `base_batch_size`, then compares the sizes at their own rates and repeats only what
            decides the answer. It takes up to four combinations of other hyperparameters, and
            keeps the best at `base_batch_size`. It needs one metric of quality as objective and
            keras-tuner's own `fit`; otherwise the search is a grid, and a note says why. `"grid"`
            trains every combination of batch size and other hyperparameters,
            `executions_per_trial` times, at the learning rate that follows the size. Default:
            `"race"`.
        search_learning_rate: Whether a race also looks for the learning rate; a grid never does.
            Set False if yours is tuned. Default: a race looks for it, unless `build` declares a
            learning rate among its hyperparameters or is a HyperModel with its own `fit`.
        tolerance: How much worse than the best still counts as equally good, in the metric's unit:
            0.01 for 1 % of accuracy. Default: that of `Study.decide`.
        confidence: Confidence level of the decision, above 0.5 and below 1. At 0.95, at most 5 % of
            searches report a wrong size as certain. It is not the probability that one certain
            answer is right. Default: 0.95.
        time_budget_s: Wall-clock seconds for a call of `search`, the plan included. It ends at most
            5 % or one training run later. A later call continues with a budget of its own.
            Default: no limit.
        max_trainings: Most complete training runs of a race. A run of 2 of 10 epochs counts 0.2.
            Default: two for each batch size.
        executions_per_trial: How many times each trial trains, each time with a seed of its own.
        executor: Runs each training run in its own process, so that memory is freed and a crash
            ends that run only. `"local"` uses this host: one run at a time on each GPU, or on
            every two cores of a CPU. An object with `submit(function, *arguments)` that returns
            futures with `done()`, `result()` and `cancel()` is used as it is: a pool of
            `concurrent.futures`, Dask's `Client`, an executor of submitit, or
            `kbatch.ray_executor()`. A process takes some seconds to start, data must be arrays or
            functions, and what callbacks collect stays in that process. Default: all runs in this
            process, one after the other.
        max_parallel: Most trials that an executor has at a time. 1 isolates trials that run one by
            one. Default: all that the strategy asks for, and with `"local"` one for each device.
        distribution_strategy: A `tf.distribute.Strategy` to train under.
        directory: Folder for results. Default: the working directory.
        project_name: Name of the folder in `directory`. Default: `"search"`.
        overwrite: Whether to delete what the folder holds. If False, the search continues with the
            trials there, if model, data, arguments of `fit` and search space are the same. More
            batch sizes and more executions extend it.

    Raises:
        TypeError: If `build` is something else.
        ValueError: If an argument cannot be used, or the folder holds a search with other settings.
    """

    hypermodel: Any
    oracle: Any

    @tuner_arguments.as_public_method
    def __init__(
        self,
        build: BuildFunction | keras_tuner.HyperModel,
        objective: Any = "val_loss",
        *,
        batch_sizes: Iterable[int] | None = None,
        strategy: Literal["race", "grid"] = "race",
        time_budget_s: float | None = None,
        max_trainings: float | None = None,
        search_learning_rate: bool | None = None,
        executions_per_trial: int = 1,
        tolerance: float | None = None,
        confidence: float = DEFAULT_CONFIDENCE,
        executor: Any = None,
        max_parallel: int | None = None,
        distribution_strategy: Any = None,
        directory: str | Path | None = None,
        project_name: str | None = None,
        overwrite: bool = False,
    ):
        hypermodel = tuner_arguments.given_hypermodel(build, batch_sizes)
        self._build = as_hypermodel(build) if hypermodel is None else hypermodel.wrapped
        tuner_arguments.check_objective(objective, self._build)
        why = tuner_arguments.reason_for_grid(objective, self._build)
        races = strategy == "race" and why is None
        tuner_arguments.check_strategy(
            strategy,
            races=races,
            search_learning_rate=search_learning_rate,
            executor=executor,
            executions_per_trial=executions_per_trial,
            time_budget_s=time_budget_s,
            max_trainings=max_trainings,
            distribution_strategy=distribution_strategy,
        )
        tuner_arguments.check_executor(executor, max_parallel)
        self._race = RaceStrategy() if races else None
        self.time = SearchTime(time_budget_s)
        oracle = BatchSizeOracle(objective, self._race, self.time)
        check_tolerance(tolerance, confidence, oracle.objective.name)
        project = tuner_arguments.check_directory(directory, project_name, overwrite=overwrite)
        # keras-tuner sets it after the reload, which needs it.
        self.executions_per_trial = check_size(
            executions_per_trial, "executions_per_trial", unit=""
        )
        given: dict[str, object] = {
            "strategy": "race" if races else "grid",
            "grid_because": why if strategy == "race" else None,
            "confidence": confidence,
            "tolerance": tolerance,
            "max_trainings": max_trainings,
            "time_budget_s": time_budget_s,
            "search_learning_rate": search_learning_rate,
        }
        #: The settings that decisions are made by. They change no training.
        self.decides_by = {name: value for name, value in given.items() if value is not None}
        self.progress = SearchProgress(verbose=0)
        self.executor, self.max_parallel = executor, max_parallel
        self._live: list[LivePlot] = []
        # The facts of the space and the model, and the hyperparameters that it was built with;
        # `identity` has those of a call of `search` too.
        self._explored: tuple[dict[str, str], dict[str, Any]] = ({}, {})
        self.identity = self._explored
        # The folder is checked before keras-tuner deletes or reads it.
        if overwrite and (project / LOCK_NAME).exists():
            with search_lock(project):  # No search runs in what is deleted.
                pass
        if hypermodel is not None:
            hypermodel.restore(None if overwrite else project)
        super().__init__(
            oracle,
            hypermodel,
            directory=str(project.parent),
            project_name=project.name,
            overwrite=overwrite,
            executions_per_trial=executions_per_trial,
            distribution_strategy=distribution_strategy,
        )
        if hypermodel is not None:
            self._declare_rates()

    @property
    def study(self) -> Study:
        """The trials so far, read from their files, as `kbatch.load_study` does."""
        return load_study(self)

    @tuner_arguments.as_public_method
    def search(self, *args: Any, verbose: int | str = "auto", **kwargs: Any) -> None:
        """Run the trials that have not ended yet.

        Args:
            *args: The arguments of `keras.Model.fit`. Data are arrays, a dataset or a `PyDataset`,
                whose batches are joined and cut to each size, or a function that takes the batch
                size and returns one of these. Use a function if each batch is padded to its own
                length. Validation batches of such lengths are used as they are.
            verbose: 0 for no output, 1 for a line for each trial and a live bar, 2 also for a line
                for each epoch of a trial that runs in this process. Default: `"auto"`, which is 1.
            **kwargs: The arguments of `keras.Model.fit`.

        Raises:
            KeyboardInterrupt: If the search is interrupted. It says how to continue.
            ValueError: If an argument cannot be used, so that no trial could train.
        """
        shown = check_verbose(verbose)
        self.time.begin()
        stock_fit = has_stock_fit(self._build)
        call = FitCall.of_search(args, kwargs, stock_fit=stock_fit)
        tuner_arguments.check_call(call, stock_fit=stock_fit, races=self._race is not None)
        if self.hypermodel is None:
            parallel = self.executor is not None
            sizes = tuner_arguments.default_batch_sizes(self._build, call.data, parallel=parallel)
            hypermodel = BatchSizeHyperModel(self._build, sizes)
            hypermodel.restore(Path(self.project_dir))
            self.hypermodel = hypermodel
            try:
                self._populate_initial_space()
                self._declare_rates()
            except BaseException:  # `build` may be fixed, and `search` called again.
                self.hypermodel = None
                self.oracle.hyperparameters = keras_tuner.HyperParameters()
                raise
        self.time.base_batch_size = self.hypermodel.base_batch_size
        self.oracle.stopped = False
        self._live = [one for one in call.callbacks if isinstance(one, LivePlot)]
        project = Path(self.project_dir)
        keep = functools.partial(self._keep_progress, project)
        self.progress = SearchProgress(
            verbose=shown, search_left_s=self.time.search_left_s, keep=keep
        )
        known = load_if_readable(Progress, project / PROGRESS_NAME)
        self.time.earlier_s = (known and known.search_s) or 0.0
        try:
            with self.progress, search_lock(project), ParallelTrials.of(self, call) as parallel:
                self._compare_search(call)
                unended = ("running", "interrupted")
                kept = [one for one in readable_trials(project) if one.status not in unended]
                if ended := len(kept):
                    self.progress.say(
                        f"{pluralize(ended, 'trial')} of an earlier run kept in {project}; "
                        "`overwrite=True` starts over."
                    )
                if why := self.decides_by.get("grid_because"):
                    self.progress.say(Note.of("grid_because", why=str(why)))
                with contextlib.ExitStack() as stack:
                    # Nothing is left if no error ended it.
                    stack.push(lambda error, *_: keep(None if error else 0.0, runs=False))
                    if parallel is None:
                        # keras-tuner's display and Keras's bar are silent: this one shows both.
                        stack.enter_context(_short_collections())
                        stack.enter_context(kept_kernels(self.hypermodel.graph.is_kept))
                        self._make_plan(call)
                        self.forget_other_policies()
                        self._begin(call)
                        super().search(*args, verbose=0, **kwargs)
                    else:
                        self._begin(call)
                        parallel.run()
                self._delete_checkpoints()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._interrupted()) from None

    def get_best_hyperparameters(self, num_trials: int = 1) -> list[Any]:
        """Return the hyperparameters of completed trials, the ones to use first.

        The first trial is the one that `Study.decide` names, even if some of its runs have not
        ended. The others follow by their mean objective.

        Args:
            num_trials: How many to return; fewer if fewer trials completed.

        Raises:
            RuntimeError: If no trial completed, with the causes.
        """
        return [trial.hyperparameters for trial in self._best_trials(num_trials)]

    def get_best_models(self, num_models: int = 1) -> list[keras.Model]:
        """Return the models of these trials with the weights of their best epoch.

        Raises:
            RuntimeError: If no trial completed, or one of these has no checkpoint, and why.
        """
        return [self.load_model(trial) for trial in self._best_trials(num_models)]

    def load_model(self, trial: Any) -> Any:
        """Build the model of a trial with the weights of its best epoch; for keras-tuner."""
        checkpoint = Path(self.get_trial_dir(trial.trial_id)) / CHECKPOINT_NAME
        if not checkpoint.exists():
            raise RuntimeError(
                f"Trial {trial.trial_id} has no checkpoint: the decided and the best trial keep "
                "theirs, where `model.fit` trains them. Train a model of "
                "`get_best_hyperparameters()` instead."
            )
        with warnings.catch_warnings():
            # The weights are what is wanted; the optimizer begins again.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            try:
                return super().load_model(trial)
            except OSError as error:
                raise RuntimeError(
                    f"The checkpoint {checkpoint} cannot be read: train a model of "
                    f"`get_best_hyperparameters()` instead. Received: {error}."
                ) from error

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Train the runs of a trial that have not completed; keras-tuner calls it."""
        asked = self.plan_executions(trial)
        self.run_executions(trial, FitCall.of_search(args, kwargs), asked)

    def on_trial_begin(self, trial: Any) -> None:
        super().on_trial_begin(trial)
        self.show_begun(trial)

    def on_trial_end(self, trial: Any) -> None:
        """Keep the result of a trial and show it; keras-tuner calls it."""
        super().on_trial_end(trial)
        record = TrialFiles(self, trial).record()
        if record and record.last.diverged:  # By the data, at each batch size and learning rate.
            self.oracle.stopped |= any(n.code == "data_not_finite" for n in record.last.notes)
        self.progress.trial_ends(record)
        for plot in self._live:
            plot.show_ended(Path(self.project_dir))

    def on_search_end(self) -> None:
        """Say why the search stopped, and if no trial completed; keras-tuner calls it."""
        super().on_search_end()
        self._keep_progress(Path(self.project_dir), 0.0, runs=False)
        if self.oracle.stopped:
            self.progress.say(
                "The search has ended, because no batch size can train with these data. Correct "
                "them, then search again with another `project_name`, or `overwrite=True`."
            )
            return
        if self._race is not None and (ending := self._race.ending()):
            self.progress.say(ending)
        elif left := self.oracle.remaining_trials():
            ended = len(self.oracle.ended_trials)
            self.progress.say(
                f"`time_budget_s` ended the search after {ended} of {ended + left} trials: run the "
                "same script again to continue."
            )
        if not self.oracle.get_best_trials(1):
            self.progress.say(self._no_best_trial())

    def save(self) -> None:
        """Do nothing: the trials' own files are the state."""

    def reload(self) -> None:
        known = recorded_search(Path(self.project_dir))
        # What `search` is called with is compared later.
        facts = {**known.facts, **self._explored[0]} if known else None
        compare_search(self, self.hypermodel.settings, facts)
        self.oracle.reload()
        for trial in self.oracle.ended_trials:
            record = TrialFiles(self, trial).record()
            assert record is not None
            completed = sum(run.status == "completed" for run in record.executions)
            # Further executions were asked for.
            if completed < self.executions_per_trial and trial.status == TrialStatus.COMPLETED:
                trial.status = TrialStatus.RUNNING

    def __getstate__(self) -> dict[str, Any]:
        """Leave the display, the executor and the budget out of a copy for another process."""
        silent = {"progress": SearchProgress(verbose=0), "executor": None, "_live": []}
        silent["time"] = SearchTime()
        return self.__dict__ | silent

    def _populate_initial_space(self) -> None:
        if self.hypermodel is None:  # Until `search` knows the data.
            return
        explore = BatchSizeTuner.explore if self.executor is None else explored_space
        space, self._explored = explore(self)
        self.oracle.update_space(space)
        self.reload()

    def explore(self) -> Any:
        """Build the model to find the space; return that, and what `_explored` holds."""
        super()._populate_initial_space()
        values, facts = self.hypermodel.described(Path(self.project_dir))
        space = self.oracle.get_space()
        return space, (identity.space_facts(space) | facts, values)

    def _make_plan(self, call: FitCall) -> None:
        """Make the plan of the search before its first trial."""
        if self._race is None and self.oracle.remaining_trials() == 0:
            return
        hp = self.oracle.get_space()
        hp.values["batch_size"] = self.hypermodel.base_batch_size
        self.progress.plan_begins()
        count = self.oracle.remaining_trials() * self.executions_per_trial
        if self._race is not None:
            task = race_task([], self.hypermodel.settings | self.decides_by)
            count = expected_trainings(task)
        trainings = count / len(self.hypermodel.batch_sizes)
        left_s = self.time.left_s()
        try:
            self.hypermodel.ensure_plan(hp, call, self, trainings=trainings, left_s=left_s)
        except (InputError, RecordError) as error:
            raise keras_tuner.errors.FatalValueError(str(error)) from None
        except keras_tuner.errors.FatalError:
            raise
        except Exception as error:  # A model may raise anything: its trial raises and records it.
            if device_is_lost(error):
                raise DeviceLostError() from error

    def _keep_progress(self, project: Path, left_s: float | None, *, runs: bool = True) -> None:
        """Write how far the search has come, for other processes."""
        # `project_dir` would make the folder again if it was moved.
        spent_s, most = self.time.earlier_s + self.time.spent_s(), self.time.most_trainings
        known = {"search_s": spent_s, "most_trainings": most, "left_s": left_s}
        write_progress(project, runs=runs, **known)

    def _can_be_short(self, call: FitCall) -> bool:
        """Return whether a run of fewer epochs is the beginning of a complete one."""
        rate = self._explored[0].get("optimizer.learning_rate", "")
        # A schedule, which may end with the training, is described by its class.
        constant = re.fullmatch(r"[\d.e+-]+", rate) is not None
        return constant and not _is_limited(call) and call.named["initial_epoch"] == 0

    def _begin(self, call: FitCall) -> None:
        """Say before the first training run what the search will cost."""
        sizes, search_time = self.hypermodel.batch_sizes, self.time
        self.progress.trials_ended = len(self.oracle.ended_trials)
        if self.executor is None and (expected := self.hypermodel.expected_seconds(call)):
            steps_s, all_s = zip(*expected.values(), strict=True)
            if not _is_limited(call):  # Else a run may end long before its last epoch.
                search_time.expected_s = dict(zip(expected, all_s, strict=True))
            search_time.training_share = sum(steps_s) / sum(all_s)
            self.decides_by["training_s"] = list(steps_s)
        if (plan := self.hypermodel.plan) is not None:
            search_time.compile_left_s = plan.compile_s or 0.0
        search_time.lap()
        left: dict[int, float] = dict.fromkeys(sizes, 0.0)
        if self._race is None:
            done = complete_trainings(readable_trials(Path(self.project_dir)))
            for values in self.oracle.values_left():
                left[values["batch_size"]] += self.executions_per_trial
        else:
            self.decides_by["epochs"] = call.epochs
            self.decides_by["short_runs"] = self._can_be_short(call)
            settings = self.hypermodel.settings | self.decides_by
            self._race.begin(Path(self.project_dir), self.oracle.get_space(), settings)
            self._conclude_ended()
            done, expected = self._race.trainings()
            # About half of the runs of a race have the base size, at which it looks for the rate.
            count = max(0.0, expected - done)
            left = dict.fromkeys(sizes, count / 2 / len(sizes))
            left[self.hypermodel.base_batch_size] += count / 2
        most = done + sum(left.values()) if self._race is None else self._race.most_trainings()
        search_time.trainings_left, search_time.most_trainings = left, most
        self._keep_progress(Path(self.project_dir), search_time.search_left_s() or None)
        if sum(left.values()):
            self.progress.say(search_time.price())

    def run_executions(self, trial: Any, call: FitCall, asked: AskedRun) -> None:
        """Train the runs of a trial that have not completed, one by one, until one fails."""
        files, hp = TrialFiles(self, trial), trial.hyperparameters
        while (number := len(files.begin_attempt())) < files.executions:
            if number and not self.time.fits(hp.get("batch_size")):
                return
            callbacks = trial_callbacks(self, trial, call.callbacks, number)
            reporter = FitReporter(self.progress, execution=number, executions=files.executions)
            callbacks += [tuner_callback(self, trial), reporter]
            keras.backend.clear_session()
            gc.collect()  # Also what the last step held of a run that is made again.
            own = call.with_callbacks(callbacks)
            trained = self.hypermodel.run(hp, own, files, number, None, asked)
            self.forget_other_policies()
            record, seconds = trained.record, self.time.lap()
            whole = trained.share * (record.epochs_asked or 1) >= len(record.epochs)
            # XLA compiles for the first run of a size.
            compile_s = (record.first_step_s or 0.0) if record.jit_compile and whole else 0.0
            self.time.ended(record.batch_size, trained.share, seconds, compile_s=compile_s)
            if not trained.runs_again and not is_complete(trained.record):
                return

    def forget_other_policies(self) -> None:
        """Let trials that trained before the search moved to float32 train again."""
        plan = load_if_readable(Plan, Path(self.project_dir) / PLAN_NAME)
        if plan is None or plan.dtype_policy is None or plan.number == 1:
            return
        for trial in self.oracle.trials.values():
            files = TrialFiles(self, trial)
            record = files.record()
            runs = record.executions if record else ()
            if any(run.dtype_policy != plan.dtype_policy for run in runs):
                files.forget()
                trial.status = TrialStatus.RUNNING

    def _try_run_and_update_trial(self, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Run a trial and record what it raises, unless other trials would fail too."""
        files = TrialFiles(self, trial)
        try:
            self.run_trial(trial, *args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:  # A training may raise anything.
            files.record_failure(self.hypermodel, trial.hyperparameters, error)
            if isinstance(error, (keras_tuner.errors.FatalError, KeyboardInterrupt)):
                raise
            if device_is_lost(error):
                raise DeviceLostError() from error
            trial.message = failure_traceback(error)
        self.conclude(trial, files)

    def _declare_rates(self) -> None:
        """Declare factors of the learning rate for a race, unless `build` tunes a rate itself."""
        space, wanted = self.oracle.get_space(), self.decides_by.get("search_learning_rate")
        names = [one.name for one in space.space]
        if self._race is None or wanted is False:
            tuner_arguments.check_without_rates(names, self.decides_by)
            return
        if wanted is None and any(map(names_rate, names)):
            self.decides_by["search_learning_rate"] = False
            return
        self.hypermodel.searches_rate = True
        space.Choice(FACTOR_NAME, list(FACTORS), default=1.0)
        self.oracle.update_space(space)
        for trial in self.oracle.trials.values():  # Of a grid that this search continues.
            trial.hyperparameters.values.setdefault(FACTOR_NAME, 1.0)

    def plan_executions(self, trial: Any) -> AskedRun:
        """Set how often a trial trains, and return what is asked of its next training run."""
        if self._race is None:
            return AskedRun(self.executions_per_trial)
        asked = self._race.asked(trial.trial_id, trial.hyperparameters.values)
        self.executions_per_trial = asked.executions
        return asked

    def show_begun(self, trial: Any, **beside: Any) -> None:
        total = len(self.oracle.ended_trials) + self.oracle.remaining_trials()
        if self._race is not None:  # It is not known how often it trains.
            total = None
        self.progress.trial_begins(trial.hyperparameters.values, total=total, **beside)

    def conclude(self, trial: Any, files: TrialFiles) -> None:
        result = trial_result(files.record())
        if isinstance(result, str):
            trial.status, trial.message = TrialStatus.FAILED, trial.message or result
            return
        self.oracle.update_trial(trial.trial_id, *result)
        trial.status = TrialStatus.COMPLETED

    def _conclude_ended(self) -> None:
        """Conclude trials whose runs ended when the search was killed; a race may ask no more."""
        for trial in self.oracle.trials.values():
            files = TrialFiles(self, trial)
            record = None if trial.status in ENDED else files.record()
            if record is not None and record.status == "completed":
                self.conclude(trial, files)
                if trial.status == TrialStatus.COMPLETED:
                    self.oracle.score_trial(trial)
                write_trial(trial, files.project)

    def _best_trials(self, number: int) -> list[Any]:
        found = self.oracle.get_best_trials(10**6)
        decided = self._decided()
        # If a race was interrupted, some of its runs may not have ended.
        if decided is not None and decided not in found:
            found.append(decided)
        if not found:
            raise RuntimeError(self._no_best_trial())
        return sorted(found, key=lambda trial: trial is not decided)[:number]

    def _decided(self) -> Any:
        """Return the trial that the study decides on. If there is none, return None."""
        if not self.oracle.trials:
            return None
        trial = self.study.decide().trial
        return None if trial is None else self.oracle.trials.get(trial.trial_id)

    def _interrupted(self) -> str:
        """Name the answer so far, and the commands that continue the search and report it."""
        script, sentences = sys.argv[0], self.study.decide().page.sentences
        known = " ".join(sentences[:2])
        command = f": python {script}" if script.endswith(".py") else ""
        return (
            f"The search was interrupted. {known}\n"
            f"To continue, run the same script again{command}\n"
            f"To write a report: kbatch report {self.project_dir}"
        )

    def _no_best_trial(self) -> str:
        if not self.oracle.trials:
            return (
                "There is no best trial: call `search` first. Received: no trial in "
                f"{self.project_dir}."
            )
        study = self.study
        causes = [f"batch size {t.batch_size}: {t.failure or t.outcome}" for t in study.trials]
        return (
            f"There is no best trial. {study.answer} {study.use} Trials that failed are kept "
            "as results: give another `project_name`, or `overwrite=True`, to run them again. "
            f"Received: {'; '.join(at_most(causes)) or 'no training run has begun'}."
        )

    def _delete_checkpoints(self) -> None:
        """Keep the weights of the decided and of the best trial, for `get_best_models`."""
        kept = (self._decided(), *self.oracle.get_best_trials())
        for trial in self.oracle.ended_trials:
            if trial not in kept:
                for name in (CHECKPOINT_NAME, DRAFT_NAME):
                    with contextlib.suppress(OSError):  # A disk that cannot be written keeps them.
                        (Path(self.get_trial_dir(trial.trial_id)) / name).unlink(missing_ok=True)

    def _compare_search(self, call: FitCall) -> None:
        """Compare the search with the one in the directory."""
        facts, values = self._explored
        objective = identity.objective_facts(self.oracle.objective)
        self.identity = objective | facts | identity.fit_facts(call), values
        known = compare_search(self, self.hypermodel.settings, self.identity[0])
        if known is None:
            compare_runs(Path(self.project_dir), call.epochs, self.hypermodel)
        project = Path(self.project_dir)
        for trial in [*self.oracle.trials.values()]:  # Without results, sizes may be left out.
            size = trial.hyperparameters.values.get("batch_size")
            if trial.status not in ENDED and size not in (None, *self.hypermodel.batch_sizes):
                del self.oracle.trials[trial.trial_id]
                shutil.rmtree(self.get_trial_dir(trial.trial_id))
        for draft in (*project.rglob(DRAFT_NAME), *project.rglob(".*.json.*-*")):
            with contextlib.suppress(OSError):  # A process that was killed left it.
                draft.unlink()
        # A search that has ended makes no plan, and would not know these.
        self.decides_by["base_added"] = self.hypermodel.base_added
        kept = ("epochs", "short_runs", "training_s")
        there = known.settings if known else {}
        self.decides_by = {name: there[name] for name in kept if name in there} | self.decides_by
        if self._race is None:
            # By earlier runs of the search, each time more.
            before: Any = known.settings.get("executions_asked", ()) if known else ()
            asked, count = [*before], self.executions_per_trial
            more = [count] if count > max(asked, default=0) else []
            self.decides_by["executions_asked"] = asked + more
        settings = {**self.hypermodel.settings, **self.decides_by}
        # What only decisions use may change where no trial is left to run.
        if known is not None and known.settings != settings:
            file = Path(self.project_dir) / RECORD_NAME
            write_needed(dataclasses.replace(known, settings=settings), file)


def _is_limited(call: FitCall) -> bool:
    """Return whether a callback ends the training runs, at a target or at the end of a budget."""
    return any(isinstance(one, (BudgetCallback, StopAtTarget)) for one in call.callbacks)


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Leave what lives now out of garbage collections, of which keras-tuner makes one a build."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
