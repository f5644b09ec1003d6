"""Train the models of a search by one plan, and hold the state that the training runs share."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.device.failures import failure_text, refusal
from kbatch.errors import InputError, OutOfMemoryError, PolicyUnsupported, RecordError
from kbatch.library_internals import built_by
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import PLAN_NAME, AskedRun, Plan
from kbatch.search.files import TrialFiles, completed_trials, give_own_paths, write_needed
from kbatch.search.first_updates import CutBatches, overflow_text, why_not_finite
from kbatch.search.plan import (
    MOMENTS_EVERY,
    choose_xla,
    compare_parts,
    expected_seconds,
    float32_note,
    halved,
    is_cut,
    loss_is_sum,
    make_plan,
    micro_batch_size,
    notes_on_size,
    outgrown,
)
from kbatch.search.timed_fit import RunSettings, SharedInput
from kbatch.search.train import ShortRun, Trained, train
from kbatch.training.accumulation import Accumulation, sum_sparse_gradients
from kbatch.training.build_function import build_under
from kbatch.training.callbacks import StopAtTarget
from kbatch.training.data.training_data import FitCall, TrainingData
from kbatch.training.dtype_policy import HALF, dtype_policy_scope
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import ModelFacts, limit_xla
from kbatch.training.shared_graph import SharedGraph
from kbatch.training.state import kept_seeds

# Short runs are kept in memory up to this total size, so that they can be continued.
_MOST_SHORT_RUN_BYTES = 2**28
# Errors that float16 alone may cause, such as an id that is rounded up beyond the last row.
_FLOAT16_ERRORS = (PolicyUnsupported, tf.errors.InvalidArgumentError)


class TrialRuns:
    """Trains the models of a `BatchSizeHyperModel` by one plan.

    `BatchSizeTuner` calls `ensure_plan` and `run`. keras-tuner's own tuners call `fit`.
    """

    def __init__(self, hypermodel: Any):
        self._hypermodel = hypermodel
        self.plan: Plan | None = None
        self.graph = SharedGraph()
        self._input = SharedInput()
        # Short runs that can be continued, by trial and number of the run.
        self._short_runs: dict[tuple[str, int], ShortRun] = {}
        # Results of `_measured`, by the name of the function and the model's fingerprint.
        self._measurements: dict[tuple[str, str], Any] = {}
        self._warned: set[Note] = set()
        # Completed runs of each trial, because keras-tuner does not number its calls of `fit`.
        self._completed: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_short_runs": {}}

    def fit(self, hp: keras_tuner.HyperParameters, model: Any, call: FitCall, files: TrialFiles):
        """Train the model that keras-tuner has built; return what its own `fit` returns."""
        # After a failed run, keras-tuner does not call `fit` again for this trial.
        number = self._completed.pop(files.trial_id, 0)
        trained = self.run(hp, call, files, number, model)
        if trained.runs_again and trained.record.status != "out_of_memory":
            trained = self.run(hp, call, files, number)  # In float32.
        if trained.runs_again:
            raise keras_tuner.errors.FailedTrialError(
                "Memory ran out in training: later trials have smaller micro-batches. "
                f"Received: {trained.record.failure}"
            )
        self._completed[files.trial_id] = (number + 1) % files.executions
        return trained.results

    def run(
        self,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
        files: TrialFiles,
        number: int,
        model: Any = None,
        asked: AskedRun | None = None,
    ) -> Trained:
        """Train once for a trial, as the plan of the search says, and record it.

        Args:
            hp: The hyperparameters of the trial.
            call: The arguments of `fit`.
            files: The files of the trial.
            number: The number of the run in its trial, from 0.
            model: The model that keras-tuner has built. If None, this method builds it.
            asked: The settings of the run. Default: a complete run.
        """
        hypermodel = self._hypermodel
        try:
            files.check_search(hypermodel.settings)
            self.ensure_plan(hp, call, files.tuner)
            # keras-tuner builds before there is a plan, and always with the seed of the first run.
            if model is None or number or not hypermodel.has_policy(model, hp):
                model = hypermodel.build_run(files.tuner, hp, number)
            return self._train(hp, model, call, files, number, asked or AskedRun())
        except BaseException as error:
            self._release()
            refused = isinstance(error, (InputError, RecordError))
            if not refused:  # Such as for the folder of another search, which is no failed trial.
                files.record_failure(hypermodel, hp, error)
            policy = self.plan and self.plan.dtype_policy
            if isinstance(error, _FLOAT16_ERRORS) and self._may_move_to_float32(policy, hp):
                self.ensure_plan(hp, call, files.tuner, float32_because=failure_text(error))
                record = files.record()
                assert record is not None
                return Trained(record.last, runs_again=True)
            message = str(error) if refused else None
            if message is None and not any(completed_trials(files.project)):
                message = refusal(error)  # No trial has trained, so it would end every trial.
            if message is not None:
                # The messages of kbatch are clear without a cause.
                raise keras_tuner.errors.FatalValueError(message) from (None if refused else error)
            if isinstance(error, OutOfMemoryError):
                raise keras_tuner.errors.FailedTrialError(
                    f"{error} keras-tuner ends a search after three failed trials in a row: to "
                    "continue, give its oracle a larger `max_consecutive_failed_trials`."
                ) from error
            raise

    def ensure_plan(
        self,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
        tuner: Any,
        *,
        float32_because: str | None = None,
        trainings: float | None = None,
        left_s: float | None = None,
    ) -> None:
        """Read the plan of a search, or make it if there is none for these batch sizes.

        A HyperModel with its own `fit` has no plan, because kbatch does not change how it trains.

        Args:
            hp: The hyperparameters of a trial, to build models with.
            call: The arguments of `fit`.
            tuner: The tuner of the search.
            float32_because: If given, make a new plan for float32, with a note of this reason.
            trainings: Complete training runs of each size in this process. If None, they are
                unknown, and the plan does not choose whether XLA compiles the steps.
            left_s: Seconds that are left to the search. If None, it has no limit.
        """
        hypermodel, project = self._hypermodel, Path(tuner.project_dir)
        self.plan = load_if_readable(Plan, project / PLAN_NAME)
        if float32_because is not None and self.plan is not None:
            note = float32_note(float32_because)
            warnings.warn(note, stacklevel=2)
            self.plan = dataclasses.replace(self.plan, dtype_policy="float32", notes=(note,))
        known = self.plan
        is_valid = known is not None and not float32_because and not outgrown(known, hypermodel)
        if is_valid or not hypermodel.stock_fit:
            return
        models: dict[str, Any] = {}
        jit_compile = known.jit_compile if known else False if trainings else None

        def build(policy: str) -> Any:
            model = built_by(tuner, lambda: hypermodel.build_unscaled(hp, policy))
            hypermodel.check_model(model, policy)
            limit_xla(sum_sparse_gradients(model), jit_compile)
            # Training runs will use the graph that the plan traces.
            models[policy] = self.graph.model_for(model)
            return models[policy]

        data = self._data_to_measure(hp, call)
        plan = make_plan(
            build,
            data,
            hypermodel,
            build_elsewhere=functools.partial(
                build_to_measure, hypermodel.wrapped, hp, hypermodel.seed
            ),
            batch_size=hypermodel.declare(hp)[0],
            known=known,
        )
        self.graph.release(except_policy=None if plan.reason == "whole" else plan.dtype_policy)
        model = models.get(plan.dtype_policy or "")
        if trainings and plan.jit_compile is None and getattr(model, "chooses_xla", False):
            plan = self._with_xla_chosen(plan, model, data, call, trainings, left_s)
        self._write_plan(plan, project)

    def _with_xla_chosen(
        self,
        plan: Plan,
        model: Any,
        data: TrainingData,
        call: FitCall,
        trainings: float,
        left_s: float | None,
    ) -> Plan:
        """Choose whether XLA compiles the steps of the next training runs, by timing some steps."""
        batch_sizes = self._hypermodel.batch_sizes

        def expected_s(plan: Plan) -> float:
            expected = self.expected_seconds(call, plan)
            return trainings * sum(steps_s for steps_s, _ in expected.values())

        if not expected_s(plan):
            return plan
        # With a shared graph, XLA compiles one shape of each size and one for validation. Otherwise
        # each run compiles a training shape and a validation shape.
        sizes = len(batch_sizes)
        shapes = sizes + 1 if self.graph.is_kept() else 2 * (sizes * trainings + 1)
        with kept_seeds():
            plan = choose_xla(
                plan, model, data, batch_sizes, expected_s, shapes=shapes, left_s=left_s
            )
        self.graph.describe()
        return plan

    def expected_seconds(
        self, call: FitCall, plan: Plan | None = None
    ) -> dict[int, tuple[float, float]]:
        """Return the expected seconds of the train steps and of the whole run, by batch size.

        If the length of a step or of an epoch is unknown, the result is empty.
        """
        hypermodel, plan = self._hypermodel, plan or self.plan
        if plan is None or plan.step_s is None:
            return {}
        data, size = self._input.data(call.data), hypermodel.base_batch_size
        build = functools.cache(lambda: hypermodel.build(keras_tuner.HyperParameters()))
        try:
            examples, validated = data.count_examples(build, size), data.count_validated(build)
        except Exception:  # A data function may raise anything. The trial of its size records it.
            return {}
        if examples is None:
            return {}
        return expected_seconds(
            plan,
            hypermodel.batch_sizes,
            epochs=call.epochs,
            examples=examples,
            validated=validated,
            steps_per_epoch=call.named["steps_per_epoch"],
        )

    def _train(
        self, hp: Any, model: Any, call: FitCall, files: TrialFiles, number: int, asked: AskedRun
    ) -> Trained:
        """Train a model that was built for a training run."""
        hypermodel, plan, facts = self._hypermodel, self.plan, ModelFacts(model)
        batch_size, scaling = hypermodel.declare(hp)[0], hypermodel.scaling_of(model)
        validation_batch_size = hypermodel.validation_batch_size
        notes: tuple[Note, ...] = ()
        short = self._short_runs.pop((files.trial_id, number), None)
        if short is None:
            notes = give_own_paths(call.callbacks, trial_id=files.trial_id, execution=number)
        else:
            call = call.with_callbacks(short.callbacks)
        if not hypermodel.stock_fit:
            plan, cut, sums_loss = None, facts.cut_by_user, False
            size = min(facts.rows(batch_size), batch_size if cut is None else cut.micro_batch_size)
        else:
            assert plan is not None
            size = micro_batch_size(plan, facts, batch_size)
            notes += notes_on_size(plan, hypermodel.micro_batch_size, model, batch_size)
            fingerprint = model_fingerprint(model)
            if is_cut(facts, size, batch_size):
                notes += self._notes_on_cutting(fingerprint, size, hp, call)
            targets = [c.target.metric for c in call.callbacks if isinstance(c, StopAtTarget)]
            sums_loss = (
                "loss" in (*files.objective_names, *targets)
                and plan.reason != "whole"
                and self._measured(loss_is_sum, fingerprint, hp, call)
            )
            if facts.cut_by_user is None and size < facts.rows(batch_size):
                Accumulation(size, moments_every=MOMENTS_EVERY).apply(model)
            if hypermodel.micro_batch_size == "auto" and plan.micro_batch_size is not None:
                # A validation step takes less memory than a train step: it keeps no activations.
                validation_batch_size = min(
                    validation_batch_size, plan.validation_batch_size or plan.micro_batch_size
                )
            limit_xla(model, plan.jit_compile)
            if plan.reason == "whole":
                validation_batch_size = batch_size
            else:
                model = self.graph.model_for(model)
            if short is not None and not self.graph.is_kept():
                model = short.model  # The state of the short run may fit no other model.
        settings = RunSettings(
            number=number,
            seed=hypermodel.seed_of(number),
            batch_size=batch_size,
            micro_batch_size=size,
            validation_batch_size=validation_batch_size,
            largest_batch_size=hypermodel.batch_sizes[-1],
            metrics=files.objective_names if hypermodel.stock_fit else (),
            to_target="seconds_to_target" in files.measured_names,
            objective=files.objective,
            objective_parts=files.objective_parts,
            steps_per_execution=hypermodel.steps_per_execution,
            loss_is_sum=sums_loss,
            plan=plan,
            notes=notes,
            asked=asked,
        )
        if short is not None and short.model is model:
            short.restore(settings)
        else:
            short = None
        trained = train(
            model,
            hp,
            call,
            settings,
            files,
            fit=hypermodel.wrapped.fit,
            shared=self._input,
            scaling=scaling,
            short=short,
        )
        if trained.error is None:
            return self._checked_values(trained, model, hp, call, files, number)
        if trained.step_ran_out and self._halve(facts, batch_size, size, files.project):
            self._release()
            return trained._replace(error=None, runs_again=True)
        raise trained.error

    def _checked_values(
        self, trained: Trained, model: Any, hp: Any, call: FitCall, files: TrialFiles, number: int
    ) -> Trained:
        """Add a note if values were not finite. If float16 may be the cause, repeat the run."""
        record = trained.record
        note, overflows = None, overflow_text(model, record.epochs)
        # If another run has completed, the higher learning rate is the cause of a divergence.
        raised_rate = self._raises_rate(hp) and any(completed_trials(files.project))
        if overflows or (record.diverged and not raised_rate):
            note = self._measured(why_not_finite, model_fingerprint(model), hp, call)
        data_not_finite = note is not None and note.code == "data_not_finite"
        if overflows and not data_not_finite:
            part = f", first in {note.values['part']}" if note is not None else ""
            note = Note.of(
                "float16_overflows", policy=record.dtype_policy, how=f"{overflows}{part}"
            )
        failed = (note is not None or record.diverged) and not data_not_finite
        if failed and self._may_move_to_float32(record.dtype_policy, hp):
            because = note.values.get("how", note) if note else "the training diverged"
            self._release()
            self.ensure_plan(hp, call, files.tuner, float32_because=str(because))
            return trained._replace(short=None, runs_again=True)
        if note is not None:
            failure = str(note) if record.diverged else record.failure
            # Values are not finite in float32 either, so mixed_float16 was not the cause.
            others = [other for other in record.notes if other.code != "float32_instead"]
            record = dataclasses.replace(record, notes=(*others, note), failure=failure)
            files.write(number, record)
            trained = trained._replace(record=record)
        if trained.short is not None:
            self._keep_short_run((files.trial_id, number), trained.short)
        return trained

    def _may_move_to_float32(self, policy: str | None, hp: keras_tuner.HyperParameters) -> bool:
        """Return whether the search may change to float32 after a failure under this policy."""
        chosen_by_plan = self._hypermodel.stock_fit and not self._hypermodel.dtype_policies
        # A race also tries learning rates that are too high under any policy.
        return chosen_by_plan and policy == HALF and not self._raises_rate(hp)

    def _raises_rate(self, hp: keras_tuner.HyperParameters) -> bool:
        """Return whether a race tries a higher learning rate than the rule's in this trial."""
        return self._hypermodel.searches_rate and hp.get(FACTOR_NAME) > 1

    def _keep_short_run(self, key: tuple[str, int], short: ShortRun) -> None:
        """Keep a short run in memory. If the runs share no model, keep only the best run."""
        shares_model = self.graph.is_kept()
        if not shares_model and short.size_bytes > _MOST_SHORT_RUN_BYTES:
            return  # Its model would take device memory from the next one.
        others = [*self._short_runs.values()]
        size_bytes = sum(run.size_bytes for run in (*others, short))
        if others and (size_bytes > _MOST_SHORT_RUN_BYTES or not shares_model):
            if any(run.value > short.value for run in others):
                return
            self._short_runs.clear()
        self._short_runs[key] = short

    def _release(self) -> None:
        """Release the shared model and the short runs, so that the next model is a new one."""
        self.graph.release()
        self._short_runs.clear()

    def _halve(self, facts: ModelFacts, batch_size: int, size: int, project: Path) -> bool:
        """Halve the micro-batch after memory ran out. Return whether to repeat the run."""
        plan = load_if_readable(Plan, project / PLAN_NAME)  # Another process may have changed it.
        smaller = plan and halved(plan, facts, facts.rows(batch_size), size)
        if smaller is None:
            return False
        self._write_plan(smaller, project)
        return not (smaller.reason == "own_step" or facts.own_step)

    def _write_plan(self, plan: Plan, project: Path) -> None:
        self.plan = plan
        write_needed(plan, project / PLAN_NAME)

    def _notes_on_cutting(
        self, fingerprint: str, size: int, hp: keras_tuner.HyperParameters, call: FitCall
    ) -> tuple[Note, ...]:
        """Return a note if models of this fingerprint train differently on cut batches."""
        plan = self.plan
        if plan is not None and plan.parts_equal is not None and plan.model == fingerprint:
            note = plan.parts_note
        else:
            compare = functools.partial(compare_parts, size=size)
            note = self._measured(compare, fingerprint, hp, call)
        if note is not None and note not in self._warned:
            self._warned.add(note)
            warnings.warn(note, stacklevel=2)
        return () if note is None else (note,)

    def _measured(
        self,
        measure: Callable[[Any, TrainingData], Any],
        fingerprint: str,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
    ) -> Any:
        """Return the result of a measurement, which is made once for all models of a fingerprint.

        The model is built for the measurement only, because its state may not be restorable.
        """
        key = getattr(measure, "func", measure).__name__, fingerprint
        if key not in self._measurements:
            hypermodel = self._hypermodel
            policy = hypermodel.policy_of(hp) or "float32"
            # The first rows may build layers, which need the policy and draw random numbers.
            with kept_seeds(), dtype_policy_scope(policy):
                model = build_to_measure(hypermodel.wrapped, hp, hypermodel.seed, policy)
                self._measurements[key] = measure(model, self._data_to_measure(hp, call))
        return self._measurements[key]

    def _data_to_measure(self, hp: keras_tuner.HyperParameters, call: FitCall) -> TrainingData:
        """Return the training data, so that a data function gets only sizes of the search."""
        data = self._input.data(call.data)
        if data.is_function:
            first, batch_sizes = self._hypermodel.declare(hp)[0], self._hypermodel.batch_sizes
            data = dataclasses.replace(data, x=CutBatches(data.x, batch_sizes, first=first))
        return data


def build_to_measure(
    hypermodel: keras_tuner.HyperModel, hp: Any, seed: int | None, policy: str | None
) -> keras.Model:
    """Build a model for a measurement, which may run in another process."""
    return sum_sparse_gradients(build_under(hypermodel, hp, seed, policy))
