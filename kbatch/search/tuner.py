"""Search over batch sizes, and continue after interruptions and failed trials."""

import contextlib
import dataclasses
import gc
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.judge import DEFAULT_CONFIDENCE
from kbatch.analysis.learning_rate import names_rate
from kbatch.analysis.race import expected_trainings
from kbatch.device.failures import device_is_lost, failure_traceback
from kbatch.errors import DeviceLostError, InputError, RecordError
from kbatch.library_internals import kept_kernels, trial_callbacks
from kbatch.page.numbers import at_most, pluralize
from kbatch.progress import check_verbose
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import PROGRESS_NAME, RECORD_NAME, AskedRun, Progress
from kbatch.search import identity, tuner_arguments
from kbatch.search.files import (
    DRAFT_NAME,
    LOCK_NAME,
    TrialFiles,
    compare_runs,
    compare_search,
    delete_files,
    readable_trials,
    recorded_search,
    search_lock,
    write_needed,
    write_progress,
)
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.search.live_plot import LivePlot
from kbatch.search.oracle import BatchSizeOracle
from kbatch.search.parallel import ParallelTrials, explored_space
from kbatch.search.race import RaceStrategy
from kbatch.search.search_progress import FitReporter, SearchProgress, SearchTime
from kbatch.study.compared_trials import check_tolerance, is_complete
from kbatch.study.decision import race_task
from kbatch.study.study import Study, load_study
from kbatch.training.build_function import BuildFunction, as_hypermodel, has_stock_fit
from kbatch.training.callbacks import BudgetCallback, StopAtTarget
from kbatch.training.data.training_data import FitCall


class BatchSizeTuner(keras_tuner.Tuner):
    """Search for the batch size and the learning rate to train a model with.

    After an interruption, run the same script again. Trials that ended are kept. The trial that was
    interrupted continues with its first unfinished training run. If a trial runs out of memory,
    diverges or raises an error, the search records the cause and continues with the next trial.

    Example:

    >>> tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory="results")
    >>> tuner.search(x, y, validation_split=0.2, epochs=10)
    >>> print(tuner.study.decide())

    Args:
        build: A function that returns a compiled model and takes keras-tuner's `hp` or nothing, or
            a `keras_tuner.HyperModel`. Give a `kbatch.BatchSizeHyperModel` to change settings of
            the trials.
        objective: Name of a metric, a `keras_tuner.Objective`, or a list of these. If None, the
            search minimises the number that your own `HyperModel.fit` returns.
        batch_sizes: Ascending integers. The batch sizes to try, in examples. Leave it out for a
            `BatchSizeHyperModel`, which has its own. Default: powers of two from 16 to 1,024, as
            long as an epoch has at least eight batches. With the default, the first model is built
            when `search` is called.
        strategy: String. Which trials to run. `"race"` looks for the learning rate with short runs
            at `base_batch_size`, then compares the sizes at their own rates and repeats only the
            runs that decide the answer. It tries up to four combinations of other hyperparameters
            at `base_batch_size`, and keeps the best one. A race needs one metric of quality as
            objective and keras-tuner's own `fit`; otherwise the search is a grid, and a note says
            why. `"grid"` trains every combination of batch size and other hyperparameters, at the
            learning rate that follows the size. Default: `"race"`.
        search_learning_rate: Boolean. Whether a race also looks for the learning rate; a grid never
            does. Give False if your rate is tuned. Default: a race looks for it, unless `build`
            declares a learning rate as hyperparameter or is a HyperModel with its own `fit`.
        tolerance: Float. Difference from the best that counts as equally good, in the unit of the
            metric: 0.01 is one percentage point of accuracy. If None, `Study.decide` chooses it.
        confidence: Float. Confidence level of the decision, above 0.5 and below 1. At 0.95, at most
            5 % of searches report a wrong size as certain. It is a rate over many searches, not the
            probability that the answer of one search is right. Default: 0.95.
        time_budget_s: Float. Wall-clock seconds for one call of `search`, including its plan. The
            call may exceed them by 5 %, or by one training run. A later call continues with a new
            budget. Default: no limit.
        max_trainings: Float. Largest number of complete training runs of a race. A run of 2 of 10
            epochs counts 0.2. Default: two for each batch size.
        executions_per_trial: Integer. Training runs of each trial of a grid, with different seeds.
            Default: 1.
        executor: String or object that runs each training run in its own process, so that memory is
            freed and a crash ends only that run. `"local"` uses this host: one run at a time on
            each GPU, or on every two cores of a CPU. Or an object with `submit(function,
            *arguments)`, whose futures have `done()`, `result()` and `cancel()`: a pool of
            `concurrent.futures`, Dask's `Client`, submitit's executors, or `kbatch.ray_executor()`.
            A process takes seconds to start, data must be arrays or functions, and attributes of
            callbacks stay in that process. Default: this process trains all runs in turn.
        max_parallel: Integer. Largest number of trials that an executor runs at a time. With 1,
            trials run one by one, each in its own process. Default: all trials that the strategy
            asks for; with `"local"`, one for each device.
        distribution_strategy: A `tf.distribute.Strategy` to train under. Default: none.
        directory: Folder for results. Default: the working directory.
        project_name: Name of the folder in `directory`. Default: `"search"`.
        overwrite: Boolean. Whether to delete the contents of the folder. If False, the search
            continues with the trials there, if model, data, arguments of `fit` and search space are
            the same. You can add batch sizes and executions. Default: False.

    Raises:
        TypeError: If `build` cannot build a model.
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
        hypermodel = tuner_arguments.hypermodel_of(build, batch_sizes)
        self._build = as_hypermodel(build) if hypermodel is None else hypermodel.wrapped
        tuner_arguments.check_executor(executor, max_parallel, distribution_strategy)
        #: Settings that a study reads from the record. They do not change how a model trains.
        self.study_settings = tuner_arguments.settings_of_strategy(
            strategy,
            objective,
            self._build,
            executions_per_trial=executions_per_trial,
            confidence=confidence,
            tolerance=tolerance,
            max_trainings=max_trainings,
            time_budget_s=time_budget_s,
            search_learning_rate=search_learning_rate,
        )
        self._race = RaceStrategy() if self.study_settings["strategy"] == "race" else None
        self.time = SearchTime(time_budget_s)
        oracle = BatchSizeOracle(objective, self._race, self.time)
        check_tolerance(tolerance, confidence, oracle.objective.name)
        project = tuner_arguments.check_directory(directory, project_name, overwrite=overwrite)
        # keras-tuner calls `reload`, which reads this attribute, before it sets the attribute.
        self.executions_per_trial = check_size(
            executions_per_trial, "executions_per_trial", unit=""
        )
        self.progress = SearchProgress(verbose=0)
        self.executor, self.max_parallel = executor, max_parallel
        self._live_plots: list[LivePlot] = []
        # A description of the search space and a model, and the hyperparameters of that model. If a
        # later call continues the search, its description must be the same.
        self._described: tuple[dict[str, str], dict[str, Any]] = ({}, {})
        #: The same, with a description of the arguments of `search`.
        self.identity = self._described
        if overwrite and (project / LOCK_NAME).exists():
            with search_lock(project):  # keras-tuner deletes the folder: no search may run in it.
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
            *args: The arguments of `keras.Model.fit`. Data are arrays, a dataset, a `PyDataset`, or
                a function that takes the batch size and returns one of these. kbatch joins
                and cuts batches of a dataset to each size: use a function if each batch is padded
                to its own length. Validation batches of different lengths are used as they are.
            verbose: 0 for no output, 1 for a line for each trial and a live bar, 2 also for a line
                for each epoch of a trial that runs in this process. Default: `"auto"`, which is 1.
            **kwargs: The arguments of `keras.Model.fit`.

        Raises:
            KeyboardInterrupt: If the search is interrupted. The message says how to continue.
            ValueError: If an argument cannot be used, so that no trial could train.
        """
        verbosity = check_verbose(verbose)
        self.time.begin()
        stock_fit = has_stock_fit(self._build)
        call = FitCall.of_search(args, kwargs, stock_fit=stock_fit)
        tuner_arguments.check_call(call, stock_fit=stock_fit, races=self._race is not None)
        hypermodel = self.hypermodel or self._hypermodel_of_default_sizes(call)
        self.time.base_batch_size = hypermodel.base_batch_size
        self.oracle.stopped = False
        self._live_plots = [plot for plot in call.callbacks if isinstance(plot, LivePlot)]
        project = Path(self.project_dir)
        self.progress = SearchProgress(
            verbose=verbosity, search_left_s=self.time.search_left_s, write=self._write_progress
        )
        earlier = load_if_readable(Progress, project / PROGRESS_NAME)
        self.time.earlier_s = (earlier and earlier.search_s) or 0.0
        try:
            with self.progress, search_lock(project), contextlib.ExitStack() as stack:
                parallel = None if self.executor is None else ParallelTrials(self, call)
                if parallel is not None:
                    stack.callback(parallel.close)
                self._compare_search(call)
                trials = readable_trials(project)
                ended = sum(t.status not in ("running", "interrupted") for t in trials)
                if ended:
                    self.progress.say(
                        f"the search continues with {pluralize(ended, 'trial')} in {project}; "
                        "`overwrite=True` starts over."
                    )
                if why := self.study_settings.get("grid_because"):
                    self.progress.say(Note.of("grid_because", why=str(why)))
                stack.push(lambda error, *_: self._write_progress(None if error else 0.0, False))
                if parallel is None:
                    # keras-tuner collects garbage in each build, which is slow with many objects.
                    if gc.get_freeze_count() == 0:  # Else `unfreeze` would free the program's own.
                        gc.freeze()
                        stack.callback(gc.unfreeze)
                    stack.enter_context(kept_kernels(hypermodel.runs.graph.is_kept))
                    self._make_plan(call)
                    self.oracle.reopen_other_policies()
                    self._begin(call)
                    # `progress` replaces keras-tuner's display and Keras's progress bar.
                    super().search(*args, verbose=0, **kwargs)
                else:
                    self._begin(call)
                    parallel.run()
                self._delete_checkpoints()
        except KeyboardInterrupt:
            answer = " ".join(self.study.decide().page.sentences[:2])
            command = f": python {sys.argv[0]}" if sys.argv[0].endswith(".py") else ""
            raise KeyboardInterrupt(
                f"The search was interrupted. {answer}\n"
                f"To continue, run the same script again{command}\n"
                f"To write a report: kbatch report {self.project_dir}"
            ) from None

    def get_best_hyperparameters(self, num_trials: int = 1) -> list[Any]:
        """Return the hyperparameters of completed trials, the best ones first.

        The first trial is the one that `Study.decide` names, even if some of its runs have not
        ended. The others follow by their mean objective.

        Args:
            num_trials: Integer. Largest number of trials. Default: 1.

        Returns:
            A list of `keras_tuner.HyperParameters`. It is shorter if fewer trials completed.

        Raises:
            RuntimeError: If no trial completed. The message gives the causes.
        """
        return [trial.hyperparameters for trial in self._best_trials(num_trials)]

    def get_best_models(self, num_models: int = 1) -> list[keras.Model]:
        """Return the models of the best trials, with the weights of their best epoch.

        Args:
            num_models: Integer. Largest number of models. Default: 1.

        Returns:
            A list of compiled models. It is shorter if fewer trials completed.

        Raises:
            RuntimeError: If no trial completed, or if one of these trials has no checkpoint.
        """
        return [self.load_model(trial) for trial in self._best_trials(num_models)]

    def load_model(self, trial: Any) -> Any:
        """Build the model of a trial with the weights of its best epoch. keras-tuner calls this."""
        with warnings.catch_warnings():
            # The state of the optimizer is not needed.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            try:
                return super().load_model(trial)
            except OSError as error:
                raise RuntimeError(
                    f"The checkpoint of trial {trial.trial_id} cannot be read: build a model with "
                    "`get_best_hyperparameters()` and train it. kbatch keeps a checkpoint only of "
                    "the recommended trial and of the trial with the best objective, and only if "
                    f"`model.fit` trained the model. Received: {error}."
                ) from error

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Train the runs of a trial that have not completed. keras-tuner calls this."""
        self.run_executions(trial, FitCall.of_search(args, kwargs), self.plan_executions(trial))

    def on_trial_begin(self, trial: Any) -> None:
        super().on_trial_begin(trial)
        self.show_trial_begins(trial)

    def on_trial_end(self, trial: Any) -> None:
        """Keep the result of a trial and show it. keras-tuner calls this."""
        super().on_trial_end(trial)
        record = TrialFiles(self, trial).record()
        if record and record.last.diverged:  # With NaN in the data, every other trial diverges too.
            self.oracle.stopped |= any(n.code == "data_not_finite" for n in record.last.notes)
        self.progress.trial_ends(record)
        for plot in self._live_plots:
            plot.show_ended(Path(self.project_dir))

    def on_search_end(self) -> None:
        """Print why the search ended, and the causes if no trial completed. For keras-tuner."""
        super().on_search_end()
        if self.oracle.stopped:
            self.progress.say(
                "The search has ended, because no batch size can train with these data. Correct "
                "the data, then search with another `project_name`, or with `overwrite=True`."
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
        """Do nothing, because the files of the trials are the state."""

    def reload(self) -> None:
        """Read the trials of the project directory, if it holds the same search."""
        search = recorded_search(Path(self.project_dir))
        # The arguments of `search` are not known yet. `_compare_search` compares them later.
        facts = {**search.facts, **self._described[0]} if search else None
        compare_search(self, self.hypermodel.settings, facts)
        self.oracle.reload()
        self.oracle.reopen_trials(self.executions_per_trial)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the display, the executor and the budget out of a copy for another process."""
        return self.__dict__ | {
            "progress": SearchProgress(verbose=0),
            "executor": None,
            "time": SearchTime(),
            "_live_plots": [],
        }

    def _hypermodel_of_default_sizes(self, call: FitCall) -> Any:
        """Make a hypermodel whose batch sizes follow from the number of training examples."""
        parallel = self.executor is not None
        sizes = tuner_arguments.default_batch_sizes(self._build, call.data, parallel=parallel)
        hypermodel = BatchSizeHyperModel(self._build, sizes)
        hypermodel.restore(Path(self.project_dir))
        self.hypermodel = hypermodel
        try:
            self._populate_initial_space()
            self._declare_rates()
        except BaseException:  # The user may correct `build` and call `search` again.
            self.hypermodel = None
            self.oracle.hyperparameters = keras_tuner.HyperParameters()
            raise
        return hypermodel

    def _populate_initial_space(self) -> None:
        if self.hypermodel is not None:  # Otherwise `search` calls this when it knows the data.
            here = self.executor is None
            space, self._described = self.explore() if here else explored_space(self)
            self.oracle.update_space(space)
            self.reload()

    def explore(self) -> Any:
        """Build the model to find the search space. Return the space and the new `_described`."""
        super()._populate_initial_space()
        values, facts = self.hypermodel.describe_model(Path(self.project_dir))
        space = self.oracle.get_space()
        return space, (identity.space_facts(space) | facts, values)

    def _declare_rates(self) -> None:
        """Make the learning rate a hyperparameter of a race, unless `build` tunes one itself."""
        names = [parameter.name for parameter in self.oracle.get_space().space]
        asked = self.study_settings.get("search_learning_rate")
        if self._race is None or asked is False:
            tuner_arguments.check_without_rates(names, self.study_settings)
        elif asked is None and any(map(names_rate, names)):
            self.study_settings["search_learning_rate"] = False
        else:
            self.hypermodel.searches_rate = True
            self.oracle.declare_rates()

    def _compare_search(self, call: FitCall) -> None:
        """Raise InputError if the directory holds another search, else update its settings."""
        project, (facts, values) = Path(self.project_dir), self._described
        parts = getattr(self.oracle.objective, "objectives", [self.oracle.objective])
        objective = " and ".join(f"{part.name} ({part.direction})" for part in parts)
        facts = {"objective": objective} | facts | identity.fit_facts(call)
        self.identity = facts, values
        search = compare_search(self, self.hypermodel.settings, facts)
        if search is None:
            compare_runs(project, call.epochs, self.hypermodel)
        self.oracle.drop_other_sizes(self.hypermodel.batch_sizes)
        # A process that was killed may have left half-written files.
        delete_files(*project.rglob(DRAFT_NAME), *project.rglob(".*.json.*-*"))
        recorded: Any = search.settings if search else {}
        # If all trials have ended, this call makes no plan, so it keeps these of an earlier call.
        names = ("epochs", "short_runs", "training_s")
        earlier = {n: recorded[n] for n in names if n in recorded}
        self.study_settings = earlier | self.study_settings
        self.study_settings["base_added"] = self.hypermodel.base_added
        if self._race is None:
            asked = [*recorded.get("executions_asked", ())]
            if self.executions_per_trial > max(asked, default=0):
                asked.append(self.executions_per_trial)
            self.study_settings["executions_asked"] = asked
        settings = {**self.hypermodel.settings, **self.study_settings}
        # If no trial is left to run, no other code writes the record.
        if search is not None and search.settings != settings:
            write_needed(dataclasses.replace(search, settings=settings), project / RECORD_NAME)

    def _make_plan(self, call: FitCall) -> None:
        """Make the plan of the search before its first trial."""
        count = self.oracle.remaining_trials() * self.executions_per_trial
        if self._race is not None:
            task = race_task([], self.hypermodel.settings | self.study_settings)
            count = expected_trainings(task)
        elif count == 0:
            return
        hp = self.oracle.get_space()
        hp.values["batch_size"] = self.hypermodel.base_batch_size
        self.progress.plan_begins()
        trainings, left_s = count / len(self.hypermodel.batch_sizes), self.time.left_s()
        try:
            self.hypermodel.runs.ensure_plan(hp, call, self, trainings=trainings, left_s=left_s)
        except (InputError, RecordError) as error:
            raise keras_tuner.errors.FatalValueError(str(error)) from None
        except keras_tuner.errors.FatalError:
            raise
        except Exception as error:  # A model may raise anything. Its trial will record the error.
            if device_is_lost(error):
                raise DeviceLostError() from error

    def _begin(self, call: FitCall) -> None:
        """Begin the race, if there is one, and print the expected cost of the search."""
        sizes, search_time = self.hypermodel.batch_sizes, self.time
        ends_early = any(isinstance(c, (BudgetCallback, StopAtTarget)) for c in call.callbacks)
        self.progress.trials_ended = len(self.oracle.ended_trials)
        if self.executor is None and (expected := self.hypermodel.runs.expected_seconds(call)):
            steps_s, all_s = zip(*expected.values(), strict=True)
            if not ends_early:
                search_time.expected_s = dict(zip(expected, all_s, strict=True))
            search_time.training_share = sum(steps_s) / sum(all_s)
            self.study_settings["training_s"] = list(steps_s)
        plan = self.hypermodel.runs.plan
        search_time.compile_left_s = (plan and plan.compile_s) or 0.0
        search_time.lap()
        if self._race is not None:
            rate = self._described[0].get("optimizer.learning_rate", "")
            # A short run trains like the first epochs of a complete run only at a constant rate.
            constant_rate = re.fullmatch(r"[\d.e+-]+", rate) is not None
            short_runs = constant_rate and not ends_early and call.named["initial_epoch"] == 0
            self.study_settings |= {"epochs": call.epochs, "short_runs": short_runs}
            settings = self.hypermodel.settings | self.study_settings
            self._race.begin(Path(self.project_dir), self.oracle.get_space(), settings)
            self.oracle.conclude_completed()
        search_time.trainings_left, search_time.most_trainings = self.oracle.trainings_left(
            sizes, self.executions_per_trial
        )
        self._write_progress(search_time.search_left_s() or None)
        self.progress.say(search_time.price())

    def _write_progress(self, left_s: float | None, running: bool = True) -> None:
        """Write how far the search has come, so that `load_study` of another process shows it."""
        write_progress(
            # keras-tuner's `project_dir` would create the folder again if the user has moved it.
            Path(self.directory, self.project_name),
            running=running,
            search_s=self.time.earlier_s + self.time.spent_s(),
            most_trainings=self.time.most_trainings,
            left_s=left_s,
        )

    def plan_executions(self, trial: Any) -> AskedRun:
        """Set the number of training runs of a trial, and return the settings of the next one."""
        if self._race is None:
            return AskedRun(self.executions_per_trial)
        asked = self._race.asked(trial.trial_id, trial.hyperparameters.values)
        self.executions_per_trial = asked.executions
        return asked

    def run_executions(self, trial: Any, call: FitCall, asked: AskedRun) -> None:
        """Train the runs of a trial that have not completed, one by one, until one fails."""
        files, hp = TrialFiles(self, trial), trial.hyperparameters
        while (number := len(files.begin_attempt())) < files.executions:
            if number and not self.time.fits(hp.get("batch_size")):
                return
            callbacks = trial_callbacks(self, trial, call.callbacks, number)
            reporter = FitReporter(self.progress, execution=number, executions=files.executions)
            callbacks.append(reporter)
            keras.backend.clear_session()
            gc.collect()  # If a run is repeated, its first attempt may still hold memory.
            trained = self.hypermodel.runs.run(
                hp, call.with_callbacks(callbacks), files, number, asked=asked
            )
            self.oracle.reopen_other_policies()
            record, seconds = trained.record, self.time.lap()
            is_first = trained.share * (record.epochs_asked or 1) >= len(record.epochs)
            # XLA compiles in the first run of a size.
            compile_s = (record.first_step_s or 0.0) if record.jit_compile and is_first else 0.0
            self.time.ended(record.batch_size, trained.share, seconds, compile_s=compile_s)
            if not trained.runs_again and not is_complete(record):
                return

    def _try_run_and_update_trial(self, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Run a trial and record its error. Raise errors that would end every other trial, too."""
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
        self.oracle.conclude(trial)

    def show_trial_begins(self, trial: Any, *, took_s: float | None = None) -> None:
        """Show that a trial begins. `took_s`: the seconds of a trial that an executor has run."""
        known = self._race is None  # The number of trials of a race is not known.
        total = len(self.oracle.ended_trials) + self.oracle.remaining_trials() if known else None
        self.progress.trial_begins(trial.hyperparameters.values, total=total, took_s=took_s)

    def _best_trials(self, number: int) -> list[Any]:
        """List trials, best first. In a race, the first one may have runs that have not ended."""
        decided = self._decided_trial()
        others = [trial for trial in self.oracle.get_best_trials(10**6) if trial is not decided]
        if decided is None and not others:
            raise RuntimeError(self._no_best_trial())
        return [*([] if decided is None else [decided]), *others][:number]

    def _decided_trial(self) -> Any:
        """Return the trial that `Study.decide` names, or None if it names none."""
        if not self.oracle.trials:
            return None
        trial = self.study.decide().trial
        return None if trial is None else self.oracle.trials.get(trial.trial_id)

    def _no_best_trial(self) -> str:
        if not self.oracle.trials:
            return (
                "There is no best trial: call `search` first. Received: no trial in "
                f"{self.project_dir}."
            )
        study = self.study
        causes = [f"batch size {t.batch_size}: {t.failure or t.outcome}" for t in study.trials]
        received = "; ".join(at_most(causes)) or "no training run has begun"
        return (
            f"There is no best trial. {study.answer} {study.use} To run failed trials again, give "
            f"another `project_name`, or `overwrite=True`. Received: {received}."
        )

    def _delete_checkpoints(self) -> None:
        """Delete all checkpoints except those that `get_best_models` loads by default."""
        best = (self._decided_trial(), *self.oracle.get_best_trials())
        for trial in self.oracle.ended_trials:
            if trial not in best:
                delete_files(*Path(self.get_trial_dir(trial.trial_id)).glob("*.weights.h5"))
