"""Batch size as a hyperparameter: a HyperModel around your own."""

import contextlib
import copy
import dataclasses
import functools
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, check_size_or_auto
from kbatch.analysis.learning_rate import (
    FACTOR_NAME,
    FACTORS,
    FOLLOWERS,
    LearningRateScaling,
    check_followers,
    check_rule,
)
from kbatch.device.failures import failure_text, refusal
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError, OutOfMemoryError, PolicyUnsupported, RecordError
from kbatch.library_internals import build_again, built_by
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import (
    PLAN_NAME,
    RECORD_NAME,
    AskedRun,
    ExecutionRecord,
    Plan,
    SearchRecord,
)
from kbatch.search import BASE_BATCH_SIZE
from kbatch.search.build import BuiltParts, build_to_train, reads_batch_size
from kbatch.search.files import (
    TrialFiles,
    completed_trials,
    give_own_paths,
    recorded_search,
    trial_files,
    write_needed,
)
from kbatch.search.first_updates import CutBatches, overflow_text, why_not_finite
from kbatch.search.identity import model_facts
from kbatch.search.plan import (
    MOMENTS_EVERY,
    PlanSettings,
    choose_xla,
    compare_parts,
    expected_seconds,
    float32_note,
    halved,
    is_cut,
    loss_is_sum,
    make_plan,
    notes_on_size,
    outgrown,
    size_of,
)
from kbatch.search.train import RunSettings, SharedInput, ShortRun, Trained, train
from kbatch.training import accumulation
from kbatch.training.build_function import BuildFunction, as_hypermodel, build_under, has_stock_fit
from kbatch.training.callbacks import StopAtTarget
from kbatch.training.data.training_data import FitCall, TrainingData
from kbatch.training.dtype_policy import (
    HALF,
    POLICIES,
    check_active_policy,
    check_dtype_policies,
    dtype_policy_scope,
    global_policy,
)
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.learning_rate import scale_model
from kbatch.training.model import ModelFacts, check_trainable, replica_count, set_xla
from kbatch.training.shared_graph import SharedGraph
from kbatch.training.state import check_seed, kept_seeds
from kbatch.training.steps_per_execution import Steps

_LARGEST_VALIDATION_BATCH = 256
# The most bytes of short runs that are kept in memory, so that they can be continued.
_MOST_KEPT = 2**28
# Errors that float16 alone may cause, such as an id that is rounded up beyond the last row.
_OF_FLOAT16 = (PolicyUnsupported, tf.errors.InvalidArgumentError)
# Seeds that are drawn: few enough to be read aloud.
_SEEDS = 10_000


class BatchSizeHyperModel(keras_tuner.HyperModel):
    """Make the batch size a hyperparameter of any keras-tuner search.

    It works with every tuner of keras-tuner. Each trial is built under the dtype policy of the
    search, its learning rate follows the batch size, and batches above `micro_batch_size` are
    accumulated. It writes records for `kbatch.load_study` next to keras-tuner's own files. Models
    that are compiled with `jit_compile="auto"` are compiled by XLA if a `BatchSizeTuner` trains
    them in one process and that saves more time than it takes.

    Example:

    >>> hypermodel = kbatch.BatchSizeHyperModel(
    ...     build, kbatch.powers_of_two(16, 1024), micro_batch_size=128, seed=0)
    >>> tuner = keras_tuner.GridSearch(hypermodel, "val_accuracy", directory="results")
    >>> tuner.search(x, y, validation_split=0.2, epochs=10)
    >>> kbatch.plot_trials(kbatch.load_study(tuner))

    Args:
        build: A function that returns a compiled model and takes keras-tuner's `hp` or nothing, or
            a `keras_tuner.HyperModel`. It may read `hp.get("batch_size")`. Each call must create
            all layers and optimizers that training changes. A HyperModel with its own `fit` trains
            as you wrote it: kbatch sets the batch size of its `model.fit`, measures the training,
            and changes nothing else.
        batch_sizes: Batch sizes to try, in examples: ascending integers.
        micro_batch_size: Examples that go through a device at once. Larger batches are accumulated.
            Under a `distribution_strategy` this is a part of the batch of each replica. `"auto"`:
            the largest size that fits in memory, measured once before the first training; if memory
            runs out later, the size is halved. `None`: the whole batch at once. A trial measures
            the gradient noise scale if its batch is cut, so a size of at most half the smallest
            batch measures it in every trial. A model that the build function has cut with
            `accumulate_gradients` is not changed, and a model with its own `train_step` is not cut.
            Default: `"auto"`.
        dtype_policy: Name of a Keras dtype policy, or several names, which make it a hyperparameter
            (`"dtype_policy"`). Default: the policy that `keras.config.set_dtype_policy` or
            `set_floatx` has set; else `"mixed_float16"`, or `"float32"` if the model cannot be
            updated in float16, if that takes more than twice as long on a CPU, or if several
            replicas share a batch, because Keras checks only the first replica for overflows.
        learning_rate_scaling: How the learning rate follows the batch size: `"linear"`, `"sqrt"`,
            `None` (it does not follow) or `"auto"`, which is linear for SGD, the square root for
            Adam and similar optimizers, and `None` for others. Default: `"auto"`.
        base_batch_size: Batch size that the learning rate and other settings of the model were
            tuned for. It is always tried, and a study compares the other sizes with it. Default:
            32, or the nearest of `batch_sizes` if 32 is outside their range. A search that resumes
            keeps its base size.
        follow_batch_size: Other settings that keep their timescale in examples. `"beta_2"` (decay
            of Adam's second moment, `rho` of RMSprop), `"batch_norm_momentum"` and
            `"ema_momentum"` (average of the weights, `use_ema`) are raised to the power of the
            ratio of the batch sizes. `"weight_decay"` is multiplied by that ratio and divided by
            the factor of the learning rate. `()`: no setting follows.
        steps_per_execution: Train steps that Keras starts at once. This changes how long steps take
            and nothing else. `"auto"`: as many as take about 100 ms, from a few timed steps that
            change nothing. It is 1 if the model runs eagerly, runs on several replicas or has its
            own `train_step`, if a callback acts on train batches, or if the length of finite data
            is unknown. If you give `steps_per_epoch`, it is a divisor of that, because Keras runs
            whole executions. `None`: the number that the build function sets. A number above 1 in
            the build function is always kept. Default: `"auto"`.
        memory_limit_bytes: Memory in bytes that `"auto"` may use. Default: the memory of the GPU
            that TensorFlow may use, or half of the free memory of the host or its control group.
        seed: Seed of weights and shuffling. A further training run of a trial adds its number. If
            `None`, `BatchSizeTuner` draws one seed for the search, which follows
            `keras.utils.set_random_seed`; other tuners draw different seeds for each trial.

    Raises:
        TypeError: If `build` cannot build a model, or a size is not an integer.
        ValueError: If the sizes, the policy or the rule cannot be used.
    """

    def __init__(
        self,
        build: "keras_tuner.HyperModel | BuildFunction",
        batch_sizes: Iterable[int],
        *,
        micro_batch_size: int | Literal["auto"] | None = "auto",
        dtype_policy: str | Sequence[str] | None = None,
        learning_rate_scaling: Literal["auto", "linear", "sqrt"] | None = "auto",
        base_batch_size: int | None = None,
        follow_batch_size: Sequence[str] = FOLLOWERS,
        steps_per_execution: Steps = "auto",
        memory_limit_bytes: int | None = None,
        seed: int | None = None,
    ):
        self.wrapped = as_hypermodel(build)
        # A wrapped HyperModel that is not tunable keeps its defaults. The batch size is tuned.
        super().__init__(name=self.wrapped.name)
        self.stock_fit = has_stock_fit(self.wrapped)
        self._given_sizes = check_batch_sizes(batch_sizes)
        if base_batch_size is not None:
            base_batch_size = check_size(base_batch_size, "base_batch_size")
        self._chosen_base = base_batch_size
        smallest, largest = self._given_sizes[0], self._given_sizes[-1]
        self._set_base(base_batch_size or min(max(BASE_BATCH_SIZE, smallest), largest))
        self.micro_batch_size: Steps = check_size_or_auto(micro_batch_size, "micro_batch_size")
        self.memory_limit_bytes = check_memory_limit(memory_limit_bytes)
        # keras-tuner clears Keras's session before each build, and the global policy with it.
        self._global_policy, self._floatx = global_policy(), keras.config.floatx()
        if dtype_policy is None and self._global_policy in POLICIES[1:]:
            dtype_policy = self._global_policy
        self.dtype_policies = () if dtype_policy is None else check_dtype_policies(dtype_policy)
        self.learning_rate_scaling = check_rule(
            learning_rate_scaling, "learning_rate_scaling", ("auto",)
        )
        #: Whether a race tries factors of the learning rate, which its tuner says.
        self.searches_rate = False
        self.follow_batch_size = check_followers(follow_batch_size)
        # Examples of a validation batch, equal in all trials; under "auto" at most.
        moderate = [size for size in self.batch_sizes if size <= _LARGEST_VALIDATION_BATCH]
        self.validation_batch_size = max(moderate, default=_LARGEST_VALIDATION_BATCH)
        if isinstance(self.micro_batch_size, int):
            self.validation_batch_size = self.micro_batch_size
        self.steps_per_execution: Steps = check_size_or_auto(
            steps_per_execution, "steps_per_execution", unit=""
        )
        self.seed = check_seed(seed)
        self._check_trained_as_written()
        self.reset()

    def reset(self) -> None:
        """Forget what has been searched."""
        self.plan: Plan | None = None
        self._trained_policy: str | None = None  # Of the records, if their plan is damaged.
        self.graph = SharedGraph()  # Of all trials whose models train alike.
        self._shared = SharedInput()
        # Short runs that can be continued, by trial and number.
        self._short: dict[tuple[str, int], ShortRun] = {}
        # What was measured of models, by the name of that and their fingerprint.
        self._found: dict[tuple[str, str], Any] = {}
        self._warned: set[Note] = set()  # Once in a search.
        # The first model that was built: its hyperparameters, and what it is.
        self._first: tuple[dict[str, Any], dict[str, str]] | None = None
        self._parts = BuiltParts()
        # The model that `build` returned last, and what it was scaled by.
        self._last_built: tuple[Callable[[], Any], LearningRateScaling | None] = lambda: None, None
        self._number = 0  # Of the training run that `build` is called for, in its trial.
        # keras-tuner does not say which of its executions of a trial it asks for: by trial, how
        # many have completed in a row.
        self._completed: dict[str, int] = {}

    def for_search(self) -> "BatchSizeHyperModel":
        """Return one with the same settings for a search of its own, which shares nothing."""
        found = copy.copy(self)
        del vars(found)["build"]  # keras-tuner's wrapper around the method of this one.
        keras_tuner.HyperModel.__init__(found, self.name)
        found.reset()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last_built": (None, None), "_short": {}}

    @property
    def settings(self) -> dict[str, object]:
        """The settings of all trials of the search, by argument name."""
        return {
            "batch_sizes": list(self.batch_sizes),
            "micro_batch_size": self.micro_batch_size,
            "dtype_policy": list(self.dtype_policies) or None,
            "learning_rate_scaling": self.learning_rate_scaling,
            "base_batch_size": self.base_batch_size,
            "follow_batch_size": list(self.follow_batch_size),
            "steps_per_execution": self.steps_per_execution,
            "validation_batch_size": self.validation_batch_size,
            "seed": self.seed,
            "memory_limit_bytes": self.memory_limit_bytes,
        }

    def _set_base(self, size: int) -> None:
        self.base_batch_size = size
        #: Whether the base size is not among those that were given.
        self.base_added = size not in self._given_sizes
        self.batch_sizes = tuple(sorted({*self._given_sizes, size}))

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build the model of a trial, scaled to its batch size; keras-tuner calls it."""
        keras.config.set_floatx(self._floatx)  # This may be another process.
        keras.config.set_dtype_policy(self._global_policy)
        batch_size, policy = self._declare(hp)[0], self.policy_of(hp)
        with reads_batch_size(hp) as read:
            try:
                model = self._built(hp, policy)
            except PolicyUnsupported:  # This may only explore the search space.
                policy = "float32"
                model = self._built(hp, policy)
        if isinstance(model, keras.Model) and batch_size % replica_count(model):
            # Keras averages the first batch over replicas, and ends an execution by one iterator.
            raise keras_tuner.errors.FatalValueError(
                "Keras shares a batch evenly among replicas: give `batch_sizes` that are multiples "
                f"of {replica_count(model)}. Received: batch_size={batch_size}."
            )
        scaling = None
        if self.stock_fit:
            self._check_model(model, policy or "float32")
            accumulation.sum_sparse_gradients(model)
            base_model = None
            if read and batch_size != self.base_batch_size:
                base = hp.copy()
                base.values["batch_size"] = self.base_batch_size
                with contextlib.suppress(Exception):  # The trial of that size records it.
                    base_model = self._built(base, policy)
            scaling = scale_model(
                model,
                batch_size=batch_size,
                base_batch_size=self.base_batch_size,
                rule=self.learning_rate_scaling,
                follow_batch_size=self.follow_batch_size,
                factor=hp.get(FACTOR_NAME) if self.searches_rate else 1.0,
                base_model=base_model,
            )
        if self._first is None:
            described = model_facts(model, with_policy=bool(self.dtype_policies))
            self._first = dict(hp.values), described
        self._last_built = weakref.ref(model), scaling
        return model

    def declare_hyperparameters(self, hp: keras_tuner.HyperParameters) -> None:
        """Declare the batch size and what the wrapped HyperModel declares; for keras-tuner."""
        self._declare(hp)
        self.wrapped.declare_hyperparameters(hp)

    def fit(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: Any, **kwargs: Any):
        """Train the model of a trial and record it; keras-tuner calls it.

        It takes what `BatchSizeTuner.search` takes, and returns what the wrapped `fit` returns,
        with `samples_per_second` among the metrics.
        """
        call = FitCall.of_search(args, kwargs, stock_fit=self.stock_fit)
        files = trial_files(call.callbacks)
        # A training that fails ends the trial, and the next one is the first of another.
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
            number: How many training runs of the trial have completed before.
            model: What `build` returned, if keras-tuner has called it; else it is built here.
            asked: When the run ends before its last epoch. Default: never.
        """
        try:
            files.check_search(self.settings)
            self.ensure_plan(hp, call, files.tuner)
            # keras-tuner builds a model before there is a plan, and with the seed of the first run.
            if model is None or number or not self._has_policy(model, hp):
                model = self._built_for(files.tuner, hp, number)
            return self._train(hp, model, call, files, number, asked or AskedRun())
        except BaseException as error:
            self._release()  # Nothing of a training that failed is kept.
            own = isinstance(error, (InputError, RecordError))
            if not own:  # Such as that the directory holds another search.
                files.record_failure(self, hp, error)
            if isinstance(error, _OF_FLOAT16) and self._may_move(
                self.plan and self.plan.dtype_policy, hp
            ):
                self.ensure_plan(hp, call, files.tuner, float32_because=failure_text(error))
                failed = files.record()
                assert failed is not None
                return Trained(failed.last, runs_again=True)
            ended = self._end_of(error, files.project)
            if ended is None:
                raise
            # The messages of kbatch say enough without a cause.
            raise ended from (None if own else error)

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
        """Read the plan of a search, or make it if there is none for its batch sizes.

        A HyperModel with its own `fit` has no plan: its models train as it was written. A reason
        `float32_because` makes a new plan, by which the search trains in float32.

        If it is known how many complete `trainings` of each size follow in this process, and the
        seconds that are left for them, the plan chooses whether XLA compiles their steps.
        """
        project = Path(tuner.project_dir)
        self.plan = load_if_readable(Plan, project / PLAN_NAME)
        if float32_because is not None and self.plan is not None:
            note = float32_note(float32_because)
            warnings.warn(note, stacklevel=2)
            self.plan = dataclasses.replace(self.plan, dtype_policy="float32", notes=(note,))
        settings = PlanSettings(
            self.batch_sizes,
            self.micro_batch_size,
            self.dtype_policies,
            self.steps_per_execution,
            self.memory_limit_bytes,
        )
        known = self.plan
        if not self.stock_fit or not (
            known is None or float32_because or outgrown(known, settings)
        ):
            return
        elsewhere = functools.partial(build_to_train, self.wrapped, hp, self.seed)
        models: dict[str, Any] = {}
        chosen = known.jit_compile if known else False if trainings else None

        def build(policy: str) -> Any:
            model = built_by(tuner, lambda: self._built(hp, policy))
            self._check_model(model, policy)
            set_xla(accumulation.sum_sparse_gradients(model), chosen)
            # Training runs use the graph that is traced here.
            models[policy] = self.graph.model_for(model)
            return models[policy]

        data = self._data_to_measure(hp, call)
        size = self._declare(hp)[0]
        plan = make_plan(
            build, data, settings, build_elsewhere=elsewhere, batch_size=size, known=known
        )
        self.graph.release(except_policy=None if plan.reason == "whole" else plan.dtype_policy)
        model = models.get(plan.dtype_policy or "")
        if trainings and plan.jit_compile is None and getattr(model, "chooses_xla", False):
            plan = self._with_xla_chosen(plan, model, data, call, trainings, left_s)
        self._keep(plan, project)

    def _with_xla_chosen(
        self,
        plan: Plan,
        model: Any,
        data: TrainingData,
        call: FitCall,
        trainings: float,
        left_s: float | None,
    ) -> Plan:
        """Choose by measured steps whether XLA compiles those of the trainings to come."""

        def expected_s(plan: Plan) -> float:
            expected = self.expected_seconds(call, plan)
            return trainings * sum(steps_s for steps_s, _ in expected.values())

        if not expected_s(plan):
            return plan
        # One shape of each size and one of validation, or two of each run if no graph is shared.
        sizes = len(self.batch_sizes)
        shapes = sizes + 1 if self.graph.is_kept() else 2 * (sizes * trainings + 1)
        with kept_seeds():
            plan = choose_xla(
                plan, model, data, self.batch_sizes, expected_s, shapes=shapes, left_s=left_s
            )
        self.graph.describe()
        return plan

    def _data_to_measure(self, hp: keras_tuner.HyperParameters, call: FitCall) -> TrainingData:
        """Return the training data; of a data function, the batches of sizes of the search."""
        data = self._shared.data(call.data)
        if data.is_function:
            cut = CutBatches(data.x, self.batch_sizes, first=self._declare(hp)[0])
            data = dataclasses.replace(data, x=cut)
        return data

    def expected_seconds(
        self, call: FitCall, plan: Plan | None = None
    ) -> dict[int, tuple[float, float]]:
        """Return what a training run of each size will take by a plan; empty if unknown."""
        plan = plan or self.plan
        if plan is None or plan.step_s is None:
            return {}
        data, size = self._shared.data(call.data), self.base_batch_size
        build = functools.cache(lambda: self.build(keras_tuner.HyperParameters()))
        try:
            examples, validated = data.count_examples(build, size), data.count_validated(build)
        except Exception:  # What fails for one size says nothing about the trials of others.
            return {}
        if examples is None:
            return {}
        return expected_seconds(
            plan,
            self.batch_sizes,
            epochs=call.epochs,
            examples=examples,
            validated=validated,
            steps_per_epoch=call.named["steps_per_epoch"],
        )

    def restore(self, project: Path | None) -> None:
        """Restore what an earlier run of the search derived or drew; draw a seed if it has none."""
        # Adding sizes must not change the learning rates of the trials there, by another base
        # size, or the batches that all of them are validated with.
        found = project and load_if_readable(SearchRecord, project / RECORD_NAME)
        # If it is damaged, the reload says what is wrong with it.
        settings: Mapping[str, Any] = found.settings if found else {}
        if self.seed is None:
            self.seed = settings.get("seed")
        if self.seed is None:  # Without settings, the records know it.
            runs = (record.executions[0] for record in completed_trials(project))
            self.seed = next((run.seed for run in runs), None)
        if self.seed is None:
            # Training runs are compared by pairs with a seed in common. It is drawn from one of
            # the generators that `keras.utils.set_random_seed` seeds.
            self.seed = random.randrange(_SEEDS)
        if project is None or found is None:
            return
        self.plan = load_if_readable(Plan, project / PLAN_NAME)
        if self.plan is None:
            runs = (run for record in completed_trials(project) for run in record.executions)
            last = max(runs, key=lambda run: run.plan or 0, default=None)
            self._trained_policy = last and last.dtype_policy
        self.validation_batch_size = settings.get(
            "validation_batch_size", self.validation_batch_size
        )
        # Another search, which is refused, is named by its own base size.
        extends = set(settings.get("batch_sizes", ())) <= set(self.batch_sizes)
        if extends and self._chosen_base is None:
            self._set_base(settings.get("base_batch_size", self.base_batch_size))

    def described(self, project: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Describe the model built with the values of the identity, or with the first ones."""
        known = recorded_search(project)
        values = (known and known.hyperparameters) or None
        if self._first is None or (values is not None and values != self._first[0]):
            hp = keras_tuner.HyperParameters()
            hp.values = dict(values or {})
            self._first = None
            self.build(hp)
        assert self._first is not None
        return self._first

    def policy_of(self, hp: keras_tuner.HyperParameters) -> str | None:
        """Return the dtype policy of a trial, None if the model sets its own."""
        named = self._declare(hp)[1]
        if named is not None or not self.stock_fit:
            return named
        return (self.plan and self.plan.dtype_policy) or self._trained_policy or "float32"

    def _has_policy(self, model: Any, hp: keras_tuner.HyperParameters) -> bool:
        policy = self.policy_of(hp)
        return policy is None or model.dtype_policy.name == policy

    def _built_for(self, tuner: Any, hp: keras_tuner.HyperParameters, number: int) -> Any:
        """Build the model of a training run as its tuner does, which may load weights."""
        self._number = number
        try:
            model = build_again(tuner, hp)
        finally:
            self._number = 0
        if not self._has_policy(model, hp):
            self._built(hp, self.policy_of(hp))  # It raises why there is none.
        return model

    def _built(self, hp: keras_tuner.HyperParameters, policy: str | None) -> Any:
        """Build a model; refuse one that trains what the build function has returned before."""
        model = build_under(self.wrapped, hp, self._seed_of(self._number), policy)
        if isinstance(model, keras.Model):
            try:
                self._parts.check(model)
            except InputError as error:
                raise keras_tuner.errors.FatalValueError(str(error)) from None
        return model

    def _train(
        self,
        hp: keras_tuner.HyperParameters,
        model: Any,
        call: FitCall,
        files: TrialFiles,
        number: int,
        asked: AskedRun,
    ) -> Trained:
        """Train a model that was built for a training run."""
        built, scaling = self._last_built
        scaling = scaling if built() is model else None
        batch_size, plan, facts = self._declare(hp)[0], self.plan, ModelFacts(model)
        short = self._short.pop((files.trial_id, number), None)
        if short is not None:
            call = call.with_callbacks(short.callbacks)
        notes = (
            ()
            if short
            else give_own_paths(call.callbacks, trial_id=files.trial_id, execution=number)
        )
        validation = self.validation_batch_size
        if self.stock_fit:
            assert plan is not None
            size = size_of(plan, facts, batch_size)
            notes += notes_on_size(plan, self.micro_batch_size, model, batch_size)
            kind = model_fingerprint(model)
            targets = [one.target for one in call.callbacks if isinstance(one, StopAtTarget)]
            if is_cut(facts, size, batch_size):
                notes += self._notes_on_cutting(kind, size, hp, call)
            ranked = (*files.objective_names, *(target.metric for target in targets))
            whole = plan.reason == "whole"
            summed = "loss" in ranked and not whole
            summed = summed and self._measured(loss_is_sum, kind, hp, call)
            if facts.cut_by_user is None and size < facts.rows(batch_size):
                accumulation.Accumulation(size, moments_every=MOMENTS_EVERY).apply(model)
            if self.micro_batch_size == "auto" and plan.micro_batch_size is not None:
                # Without activations to keep, a validation needs less memory than a step.
                validation = min(validation, plan.validation_batch_size or plan.micro_batch_size)
            set_xla(model, plan.jit_compile)
            if whole:
                validation = batch_size
            else:
                model = self.graph.model_for(model)
            if short is not None and not self.graph.is_kept():
                model = short.model  # It may have state that only itself holds.
        else:
            plan, cut, summed = None, facts.cut_by_user, False
            size = min(facts.rows(batch_size), batch_size if cut is None else cut.micro_batch_size)
        settings = RunSettings(
            number=number,
            seed=self._seed_of(number),
            batch_size=batch_size,
            micro_batch_size=size,
            validation_batch_size=validation,
            largest_batch_size=self.batch_sizes[-1],
            metrics=files.objective_names if self.stock_fit else (),
            to_target="seconds_to_target" in files.measured_names,
            objective=files.objective,
            objective_parts=files.objective_parts,
            steps_per_execution=self.steps_per_execution,
            loss_is_sum=summed,
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
            fit=self.wrapped.fit,
            shared=self._shared,
            scaling=scaling,
            short=short,
        )
        if trained.error is None:
            return self._judged_by_values(trained, model, hp, call, files, number)
        if trained.step_ran_out and self._halve(facts, batch_size, size, files.project):
            self._release()
            return trained._replace(error=None, runs_again=True)
        raise trained.error

    def _judged_by_values(
        self,
        trained: Trained,
        model: Any,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
        files: TrialFiles,
        number: int,
    ) -> Trained:
        """Note values that were not finite; if float16 is to blame, let the run be made again."""
        record = trained.record
        note = self._note_on_values(record, model, hp, call, files.project)
        of_data = note is not None and note.code == "data_not_finite"
        failed = note is not None or record.diverged
        if failed and not of_data and self._may_move(record.dtype_policy, hp):
            because = note.values.get("how", note) if note else "the training diverged"
            self._release()
            self.ensure_plan(hp, call, files.tuner, float32_because=str(because))
            return trained._replace(short=None, runs_again=True)
        if note is not None:
            failure = str(note) if record.diverged else record.failure
            # What is not finite in float32 either says nothing against mixed_float16.
            others = [n for n in record.notes if n.code != "float32_instead"]
            record = dataclasses.replace(record, notes=(*others, note), failure=failure)
            files.write(number, record)
            trained = trained._replace(record=record)
        if trained.short is not None:
            self._keep_short((files.trial_id, number), trained.short)
        return trained

    def _note_on_values(
        self,
        record: ExecutionRecord,
        model: Any,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
        project: Path,
    ) -> Note | None:
        """Say which values made a training run diverge, or lose updates that overflowed."""
        how = overflow_text(model, record.epochs)
        if not (how or record.diverged):
            return None
        # The values were finite in another run, so the higher learning rate is to blame.
        if not how and self._raises_rate(hp) and any(completed_trials(project)):
            return None
        note = self._measured(why_not_finite, model_fingerprint(model), hp, call)
        if not how or (note is not None and note.code == "data_not_finite"):
            return note
        first = f", first in {note.values['part']}" if note is not None else ""
        return Note.of("float16_overflows", policy=record.dtype_policy, how=f"{how}{first}")

    def _may_move(self, policy: str | None, hp: keras_tuner.HyperParameters) -> bool:
        """Return whether a failure under a policy lets the search train in float32."""
        # A race tries rates at which training overflows under any policy.
        may_move = not self.dtype_policies and self.stock_fit and policy == HALF
        return may_move and not self._raises_rate(hp)

    def _raises_rate(self, hp: keras_tuner.HyperParameters) -> bool:
        """Return whether the search tries a higher learning rate than the rule's."""
        return self.searches_rate and hp.get(FACTOR_NAME) > 1

    def _keep_short(self, key: tuple[str, int], short: ShortRun) -> None:
        """Keep a short run in memory to continue it: all runs of a small model, else the best."""
        shared = self.graph.is_kept()
        if not shared and short.size_bytes > _MOST_KEPT:
            return  # The model would stay on the device beside the next one.
        known = [*self._short.values()]
        size = sum(one.size_bytes for one in (*known, short))
        if (size > _MOST_KEPT or not shared) and known:
            if any(one.value > short.value for one in known):
                return
            self._short.clear()
        self._short[key] = short

    def _release(self) -> None:
        """Release the kept model and the short runs, so that the next model is a new one."""
        self.graph.release()
        self._short.clear()

    def _halve(self, facts: ModelFacts, batch_size: int, size: int, project: Path) -> bool:
        """Change the plan after memory ran out; return whether the run may be made again."""
        plan = load_if_readable(Plan, project / PLAN_NAME)  # Another process may have changed it.
        smaller = plan and halved(plan, facts, facts.rows(batch_size), size)
        if smaller is None:
            return False
        self._keep(smaller, project)
        return not (smaller.reason == "own_step" or facts.own_step)

    def _keep(self, plan: Plan, project: Path) -> None:
        self.plan = plan
        write_needed(plan, project / PLAN_NAME)

    def _notes_on_cutting(
        self, kind: str, size: int, hp: keras_tuner.HyperParameters, call: FitCall
    ) -> tuple[Note, ...]:
        """Say how a model of this fingerprint trains differently because batches are cut."""
        plan = self.plan
        if plan is not None and plan.parts_equal is not None and plan.model == kind:
            note = plan.parts_note
        else:
            note = self._measured(functools.partial(compare_parts, size=size), kind, hp, call)
        if note is None:
            return ()
        if note not in self._warned:
            self._warned.add(note)
            warnings.warn(note, stacklevel=2)
        return (note,)

    def _measured(
        self,
        measure: Callable[[Any, TrainingData], Any],
        kind: str,
        hp: keras_tuner.HyperParameters,
        call: FitCall,
    ) -> Any:
        """Measure models of one fingerprint, once, on one that does not train.

        What a layer or a loss keeps outside of Keras's variables cannot be put back.
        """
        name = getattr(measure, "func", measure).__name__, kind
        if name not in self._found:
            policy = self.policy_of(hp) or "float32"
            # Layers may be built by the first rows.
            with kept_seeds(), dtype_policy_scope(policy):
                model = build_to_train(self.wrapped, hp, self.seed, policy)
                self._found[name] = measure(model, self._data_to_measure(hp, call))
        return self._found[name]

    def _end_of(self, error: BaseException, project: Path) -> Exception | None:
        """Return the error that ends the search or the trial, None if `error` itself does."""
        said = str(error) if isinstance(error, (InputError, RecordError)) else None
        # A size that has trained shows that others may.
        if said is None and not any(completed_trials(project)):
            said = refusal(error)
        if said is not None:
            return keras_tuner.errors.FatalValueError(said)
        if isinstance(error, OutOfMemoryError):
            return keras_tuner.errors.FailedTrialError(
                f"{error} keras-tuner ends a search after three failed trials in a row, unless its "
                "oracle is given a larger `max_consecutive_failed_trials`."
            )
        return None

    def _check_model(self, model: Any, policy: str) -> None:
        """Check that kbatch can train a model under a dtype policy."""
        try:
            check_trainable(model)
            check_active_policy(model, policy)
        except (TypeError, ValueError) as error:
            raise keras_tuner.errors.FatalValueError(str(error)) from error
        asked, replicas = self.steps_per_execution, replica_count(model)
        steps = max(int(model.steps_per_execution), asked if isinstance(asked, int) else 1)
        if replicas > 1 and steps > 1:
            raise keras_tuner.errors.FatalValueError(
                "Keras runs one step an execution on several replicas: leave out "
                f"`steps_per_execution`. Received: {steps} on {replicas} replicas."
            )

    def _check_trained_as_written(self) -> None:
        """Refuse settings that a custom `fit` could not follow."""
        given = {
            "micro_batch_size": isinstance(self.micro_batch_size, int),
            "learning_rate_scaling": self.learning_rate_scaling not in (None, "auto"),
            "steps_per_execution": self.steps_per_execution not in (None, "auto", 1),
        }
        if self.stock_fit or not any(given.values()):
            return
        name = next(name for name, is_given in given.items() if is_given)
        raise InputError(
            f"A HyperModel with its own `fit` trains as it is written: leave out `{name}` or use "
            "it in that `fit`. kbatch sets the batch size and measures the training. "
            f"Received: {name}={getattr(self, name)!r}."
        )

    def _declare(self, hp: keras_tuner.HyperParameters) -> tuple[int, str | None]:
        """Declare what a search adds; return the batch size, and the policy where it is given."""
        batch_size: Any = hp.Choice("batch_size", list(self.batch_sizes))
        there = [tuple(one.values) for one in hp.space if one.name == "batch_size"]
        if others := [values for values in there if values != self.batch_sizes]:
            raise keras_tuner.errors.FatalValueError(
                "The search space has another `batch_size` already, from the project directory "
                "or from `hyperparameters=`: give another `project_name`, or `overwrite=True` "
                f"to start over. Received: batch_sizes={self.batch_sizes}, there: {others[0]}."
            )
        if self.searches_rate:
            hp.Choice(FACTOR_NAME, list(FACTORS), default=1.0)
        if len(self.dtype_policies) < 2:
            return batch_size, next(iter(self.dtype_policies), None)
        policy: Any = hp.Choice("dtype_policy", list(self.dtype_policies))
        return batch_size, policy

    def _seed_of(self, number: int) -> int | None:
        return None if self.seed is None else self.seed + number
