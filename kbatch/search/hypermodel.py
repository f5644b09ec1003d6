"""Wrap a HyperModel, so that the batch size is a hyperparameter."""

import contextlib
import copy
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, check_size_or_auto
from kbatch.analysis.learning_rate import (
    FACTOR_NAME,
    FACTORS,
    FOLLOWERS,
    LearningRateScaling,
    check_followers,
    check_rule,
)
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError, PolicyUnsupported
from kbatch.library_internals import build_again, layers_of
from kbatch.records.json_codec import load_if_readable
from kbatch.records.training_run import PLAN_NAME, RECORD_NAME, Plan, SearchRecord
from kbatch.search import BASE_BATCH_SIZE
from kbatch.search.files import completed_trials, recorded_search, trial_files
from kbatch.search.identity import model_facts
from kbatch.search.runs import TrialRuns
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.build_function import BuildFunction, as_hypermodel, build_under, has_stock_fit
from kbatch.training.data.training_data import FitCall
from kbatch.training.dtype_policy import (
    POLICIES,
    check_active_policy,
    check_dtype_policies,
    global_policy,
)
from kbatch.training.learning_rate import scale_model
from kbatch.training.model import check_trainable, inner_optimizers, replica_count
from kbatch.training.state import check_seed
from kbatch.training.steps_per_execution import Steps

_LARGEST_VALIDATION_BATCH = 256
# A drawn seed is below this, so that it is short to read and to type.
_SEED_LIMIT = 10_000
# Training changes almost all values of a weight, so only this many of each are compared.
_VALUES_COMPARED = 1024


class BatchSizeHyperModel(keras_tuner.HyperModel):
    """Make the batch size a hyperparameter of any keras-tuner search.

    Each trial has the dtype policy of the search, and its learning rate follows the batch size.
    Batches above `micro_batch_size` are trained in micro-batches. kbatch writes records for
    `kbatch.load_study` next to keras-tuner's own files. Models that are compiled with
    `jit_compile="auto"` are compiled by XLA if a `BatchSizeTuner` trains them in one process and
    that saves more time than it takes.

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
        batch_sizes: Ascending integers. The batch sizes to try, in examples.
        micro_batch_size: Integer. Examples that go through a device at once. Larger batches are
            accumulated. Under a `distribution_strategy` this is a part of the batch of each
            replica. `"auto"`: the largest size that fits in memory, measured once before the first
            training; if memory runs out later, the size is halved. `None`: the whole batch at once.
            A trial measures the gradient noise scale if its batch is cut, so a size of at most half
            the smallest batch measures it in every trial. kbatch does not change a model for which
            the build function calls `accumulate_gradients`, and does not cut one with its own
            `train_step`. Default: `"auto"`.
        dtype_policy: Name of a Keras dtype policy, or several names, which make it a hyperparameter
            (`"dtype_policy"`). Default: the policy that `keras.config.set_dtype_policy` has set.
            If that is float32, which is also Keras's default, kbatch uses `"mixed_float16"`. It
            keeps `"float32"` if the model cannot be updated in float16, if float16 takes more than
            twice as long on a CPU, or if several replicas share a batch, because Keras checks only
            the first replica for overflows.
        learning_rate_scaling: How the learning rate follows the batch size: `"linear"`, `"sqrt"`,
            `None` (it does not follow) or `"auto"`, which is linear for SGD, the square root for
            Adam and similar optimizers, and `None` for others. Default: `"auto"`.
        base_batch_size: Integer. The batch size, in examples, that the learning rate and other
            settings of the model were tuned for. It is always tried, and a study compares the other
            sizes with it. Default: 32, or the nearest of `batch_sizes` if 32 is outside their
            range. A search that resumes keeps its base size.
        follow_batch_size: Names of other settings to change, so that their timescale in examples is
            the same. `"beta_2"` (decay of Adam's second moment, `rho` of RMSprop),
            `"batch_norm_momentum"` and `"ema_momentum"` (average of the weights, `use_ema`) are
            raised to the power of the ratio of the batch sizes. `"weight_decay"` is multiplied by
            that ratio and divided by the factor of the learning rate. `()`: no setting follows.
        steps_per_execution: Integer. Train steps that Keras starts at once. This changes how long
            steps take and nothing else. `"auto"`: as many as take about 100 ms, measured before the
            first training. It is 1 if the model runs eagerly, runs on several replicas or has its
            own `train_step`, if a callback acts on train batches, or if the length of finite data
            is unknown. If you give `steps_per_epoch`, it is a divisor of that, because Keras runs
            only whole executions. `None`: the number that the build function sets. A number above 1
            that the build function sets is always kept. Default: `"auto"`.
        memory_limit_bytes: Integer. Memory in bytes that `"auto"` may use. Default: the memory of
            the GPU that TensorFlow may use, or half of the free memory of the host or its control
            group.
        seed: Integer. Seed of weights and shuffling. The first training run of a trial uses `seed`,
            the second one `seed + 1`, and so on. If None, `BatchSizeTuner` draws one seed for the
            search, which `keras.utils.set_random_seed` makes repeatable. Other tuners draw new
            seeds for each trial. Default: None.

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
        # `tunable=False` of the wrapped HyperModel applies to its own hyperparameters only.
        super().__init__(name=self.wrapped.name)
        self.stock_fit = has_stock_fit(self.wrapped)
        self._requested_sizes = check_batch_sizes(batch_sizes)
        if base_batch_size is not None:
            base_batch_size = check_size(base_batch_size, "base_batch_size")
        self._requested_base = base_batch_size
        smallest, largest = self._requested_sizes[0], self._requested_sizes[-1]
        self._set_base(base_batch_size or min(max(BASE_BATCH_SIZE, smallest), largest))
        self.micro_batch_size: Steps = check_size_or_auto(micro_batch_size, "micro_batch_size")
        self.memory_limit_bytes = check_memory_limit(memory_limit_bytes)
        # keras-tuner clears Keras's session before each build, which resets the global policy.
        self._global_policy, self._floatx = global_policy(), keras.config.floatx()
        if dtype_policy is None and self._global_policy in POLICIES[1:]:
            dtype_policy = self._global_policy
        self.dtype_policies = () if dtype_policy is None else check_dtype_policies(dtype_policy)
        self.learning_rate_scaling = check_rule(
            learning_rate_scaling, "learning_rate_scaling", ("auto",)
        )
        #: Whether a race tries several factors of the learning rate. `BatchSizeTuner` sets it.
        self.searches_rate = False
        self.follow_batch_size = check_followers(follow_batch_size)
        # All trials use the same validation batches. A plan may make them smaller.
        moderate = [size for size in self.batch_sizes if size <= _LARGEST_VALIDATION_BATCH]
        self.validation_batch_size = max(moderate, default=_LARGEST_VALIDATION_BATCH)
        if isinstance(self.micro_batch_size, int):
            self.validation_batch_size = self.micro_batch_size
        self.steps_per_execution: Steps = check_size_or_auto(
            steps_per_execution, "steps_per_execution", unit=""
        )
        self.seed = check_seed(seed)
        self._check_settings_of_own_fit()
        self.reset()

    def reset(self) -> None:
        """Forget everything about an earlier search."""
        self.runs = TrialRuns(self)
        self._recorded_policy: str | None = None  # Of completed runs, if the plan is damaged.
        # The hyperparameters and the description of the first model that was built.
        self._first_model: tuple[dict[str, Any], dict[str, str]] | None = None
        self._built_parts = BuiltParts()
        self._run_number = 0  # The run of a trial, from 0, whose seed `build` uses.
        # A weak reference to the model that was built last, and its scaling.
        self._last_scaling: tuple[Callable[[], Any], LearningRateScaling | None] | None = None

    def for_search(self) -> "BatchSizeHyperModel":
        """Return a copy with the same settings, for another search. The copies share no state."""
        hypermodel = copy.copy(self)
        del vars(hypermodel)["build"]  # keras-tuner's wrapper calls the `build` of the original.
        keras_tuner.HyperModel.__init__(hypermodel, self.name)
        hypermodel.reset()
        return hypermodel

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last_scaling": None}

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
        #: Whether kbatch added the base size to the requested sizes.
        self.base_added = size not in self._requested_sizes
        self.batch_sizes = tuple(sorted({*self._requested_sizes, size}))

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build the model of a trial and scale it to its batch size. keras-tuner calls this."""
        keras.config.set_floatx(self._floatx)  # The process may be a worker, with its own defaults.
        keras.config.set_dtype_policy(self._global_policy)
        batch_size, policy = self.declare(hp)[0], self.policy_of(hp)
        with _watched_reads(hp) as reads:
            try:
                model = self.build_unscaled(hp, policy)
            except PolicyUnsupported:  # keras-tuner may build before a plan has chosen the policy.
                policy = "float32"
                model = self.build_unscaled(hp, policy)
        if isinstance(model, keras.Model) and batch_size % replica_count(model):
            # Keras averages unequal parts of a batch with equal weights.
            raise keras_tuner.errors.FatalValueError(
                "Keras splits a batch evenly among replicas: give `batch_sizes` that are multiples "
                f"of {replica_count(model)}. Received: batch_size={batch_size}."
            )
        scaling = None
        if self.stock_fit:
            self.check_model(model, policy or "float32")
            sum_sparse_gradients(model)
            base_model = None
            if reads and batch_size != self.base_batch_size:
                base = hp.copy()
                base.values["batch_size"] = self.base_batch_size
                with contextlib.suppress(Exception):  # The trial of the base size records it.
                    base_model = self.build_unscaled(base, policy)
            scaling = scale_model(
                model,
                batch_size=batch_size,
                base_batch_size=self.base_batch_size,
                rule=self.learning_rate_scaling,
                follow_batch_size=self.follow_batch_size,
                factor=hp.get(FACTOR_NAME) if self.searches_rate else 1.0,
                base_model=base_model,
            )
        if self._first_model is None:
            facts = model_facts(model, with_policy=bool(self.dtype_policies))
            self._first_model = dict(hp.values), facts
        self._last_scaling = weakref.ref(model), scaling
        return model

    def build_unscaled(self, hp: keras_tuner.HyperParameters, policy: str | None) -> Any:
        """Build a model without scaling it, and check that its trained parts are new."""
        model = build_under(self.wrapped, hp, self.seed_of(self._run_number), policy)
        if isinstance(model, keras.Model):
            try:
                self._built_parts.check(model)
            except InputError as error:
                raise keras_tuner.errors.FatalValueError(str(error)) from None
        return model

    def build_run(self, tuner: Any, hp: keras_tuner.HyperParameters, number: int) -> Any:
        """Build the model of run `number` of a trial by its tuner, which may load weights."""
        self._run_number = number
        try:
            model = build_again(tuner, hp)
        finally:
            self._run_number = 0
        if not self.has_policy(model, hp):
            self.build_unscaled(hp, self.policy_of(hp))  # Raises why the policy cannot be used.
        return model

    def scaling_of(self, model: Any) -> LearningRateScaling | None:
        """Return how `build` scaled a model, or None if another model was built after it."""
        reference, scaling = self._last_scaling or (lambda: None, None)
        return scaling if reference() is model else None

    def check_model(self, model: Any, policy: str) -> None:
        """Raise `FatalValueError` if kbatch cannot train a model under a dtype policy."""
        try:
            check_trainable(model)
            check_active_policy(model, policy)
        except (TypeError, ValueError) as error:
            raise keras_tuner.errors.FatalValueError(str(error)) from error
        steps, replicas = int(model.steps_per_execution), replica_count(model)
        if isinstance(self.steps_per_execution, int):
            steps = max(steps, self.steps_per_execution)
        if replicas > 1 and steps > 1:
            raise keras_tuner.errors.FatalValueError(
                "With several replicas Keras runs one step per execution: leave out "
                f"`steps_per_execution`. Received: steps_per_execution={steps} on {replicas} "
                "replicas."
            )

    def declare_hyperparameters(self, hp: keras_tuner.HyperParameters) -> None:
        """Declare the hyperparameters of kbatch and of the wrapped HyperModel. For keras-tuner."""
        self.declare(hp)
        self.wrapped.declare_hyperparameters(hp)

    def declare(self, hp: keras_tuner.HyperParameters) -> tuple[int, str | None]:
        """Declare kbatch's hyperparameters. Return the batch size, and the policy or None."""
        batch_size: Any = hp.Choice("batch_size", list(self.batch_sizes))
        declared = [tuple(item.values) for item in hp.space if item.name == "batch_size"]
        if others := [sizes for sizes in declared if sizes != self.batch_sizes]:
            raise keras_tuner.errors.FatalValueError(
                "`batch_sizes` differs from `batch_size` in `hyperparameters` or in the project "
                "directory: leave `batch_size` out of `hyperparameters`, or give another "
                f"`project_name`. Received: batch_sizes={self.batch_sizes}, batch_size={others[0]}."
            )
        if self.searches_rate:
            hp.Choice(FACTOR_NAME, list(FACTORS), default=1.0)
        if len(self.dtype_policies) < 2:
            return batch_size, next(iter(self.dtype_policies), None)
        policy: Any = hp.Choice("dtype_policy", list(self.dtype_policies))
        return batch_size, policy

    def fit(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: Any, **kwargs: Any):
        """Train the model of a trial and record it. keras-tuner calls this.

        It takes the arguments of `BatchSizeTuner.search`. It returns what the wrapped `fit`
        returns, with `samples_per_second` among the metrics.
        """
        call = FitCall.of_search(args, kwargs, stock_fit=self.stock_fit)
        return self.runs.fit(hp, model, call, trial_files(call.callbacks))

    def policy_of(self, hp: keras_tuner.HyperParameters) -> str | None:
        """Return the dtype policy of a trial, or None if the HyperModel has its own `fit`."""
        policy, plan = self.declare(hp)[1], self.runs.plan
        if policy is not None or not self.stock_fit:
            return policy
        return (plan and plan.dtype_policy) or self._recorded_policy or "float32"

    def has_policy(self, model: Any, hp: keras_tuner.HyperParameters) -> bool:
        """Return whether a model was built under the dtype policy of its trial."""
        return self.policy_of(hp) in (None, model.dtype_policy.name)

    def seed_of(self, number: int) -> int | None:
        """Return the seed of a training run by its number in its trial, from 0."""
        return None if self.seed is None else self.seed + number

    def restore(self, project: Path | None) -> None:
        """Restore seed, plan and base size of an earlier `search`. If it has no seed, draw one."""
        search = project and load_if_readable(SearchRecord, project / RECORD_NAME)
        settings: Mapping[str, Any] = search.settings if search else {}
        if self.seed is None:
            self.seed = settings.get("seed")
        if self.seed is None:  # The record of the search may be damaged.
            runs = (record.executions[0] for record in completed_trials(project))
            self.seed = next((run.seed for run in runs), None)
        if self.seed is None:
            # `keras.utils.set_random_seed` seeds this generator.
            self.seed = random.randrange(_SEED_LIMIT)
        if project is None or search is None:
            return
        self.runs.plan = load_if_readable(Plan, project / PLAN_NAME)
        if self.runs.plan is None:
            runs = (run for record in completed_trials(project) for run in record.executions)
            last = max(runs, key=lambda run: run.plan or 0, default=None)
            self._recorded_policy = last and last.dtype_policy
        self.validation_batch_size = settings.get(
            "validation_batch_size", self.validation_batch_size
        )
        # If the user adds sizes, the base size stays, because learning rates must not change. If
        # the user leaves sizes out, `compare_search` refuses the search later.
        extends = set(settings.get("batch_sizes", ())) <= set(self.batch_sizes)
        if extends and self._requested_base is None:
            self._set_base(settings.get("base_batch_size", self.base_batch_size))

    def describe_model(self, project: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the hyperparameters and the description of a model built with recorded values."""
        search = recorded_search(project)
        values = (search and search.hyperparameters) or None
        if self._first_model is None or (values is not None and values != self._first_model[0]):
            hp = keras_tuner.HyperParameters()
            hp.values = dict(values or {})
            self._first_model = None
            self.build(hp)
        assert self._first_model is not None
        return self._first_model

    def _check_settings_of_own_fit(self) -> None:
        """Check that no setting is given that kbatch cannot apply to a custom `fit`."""
        settings = {
            "micro_batch_size": isinstance(self.micro_batch_size, int),
            "learning_rate_scaling": self.learning_rate_scaling not in (None, "auto"),
            "steps_per_execution": self.steps_per_execution not in (None, "auto", 1),
        }
        name = next((name for name, is_set in settings.items() if is_set), None)
        if not self.stock_fit and name is not None:
            raise InputError(
                f"kbatch cannot apply `{name}`, because the HyperModel has its own `fit`: leave "
                f"`{name}` out, and apply it in `fit`. Received: {name}={getattr(self, name)!r}."
            )


@contextlib.contextmanager
def _watched_reads(hp: keras_tuner.HyperParameters) -> Iterator[list[str]]:
    """Yield a list that gets an entry each time that the batch size is read from `hp`."""
    reads: list[str] = []

    class Values(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if key == "batch_size":
                reads.append(key)
            return super().__getitem__(key)

    hp.values = Values(hp.values)
    try:
        yield reads
    finally:
        hp.values = dict(hp.values)


class BuiltParts:
    """Check that no model trains parts of an earlier model of the same build function.

    A build function may return a layer again if training does not change it, such as a frozen base
    or an adapted `Normalization`.
    """

    def __init__(self):
        # Layers, weights and optimizers of earlier models, by `id`: a reference, whether a model
        # trained the part, and, if two models have shared a weight, its first values. The same of
        # seed generators, with their first states.
        self._earlier_parts: dict[int, tuple[weakref.ref[Any], bool, np.ndarray | None]] = {}
        self._generators: dict[int, tuple[weakref.ref[Any], np.ndarray]] = {}

    def check(self, model: Any) -> None:
        """Refuse a model that has the optimizer or trained weights of an earlier model."""
        weights, optimizers, layers = model.weights, inner_optimizers(model), layers_of(model)
        trained = {id(part) for part in (*optimizers, *model.trainable_weights)}
        trained |= {id(layer) for layer in layers if any(id(w) in trained for w in layer.weights)}
        for part in (*layers, *optimizers, *weights):
            reference, was_trained, values = self._earlier_parts.get(id(part), (None, False, None))
            is_trained = id(part) in trained
            if reference is not None and reference() is part:
                if is_trained or was_trained:
                    raise _reuse_error(model, part)
                if isinstance(part, keras.Variable):
                    flat: Any = keras.ops.reshape(part, [-1])
                    values_now = np.array(flat[:_VALUES_COMPARED])
                    values = values_now if values is None else values
                    if not np.array_equal(values, values_now, equal_nan=True):
                        raise _reuse_error(model, part)
            else:
                values = None
            self._earlier_parts[id(part)] = weakref.ref(part), is_trained, values
        weight_ids = {id(weight) for weight in weights}
        for seed in (v for v in model.variables if id(v) not in weight_ids):
            reference, state = self._generators.get(id(seed), (None, None))
            if reference is not None and reference() is seed:
                seed.assign(state)  # Models may share the `Dropout` layers of a frozen base.
            else:
                self._generators[id(seed)] = weakref.ref(seed), np.array(seed.value)

    def __reduce__(self):
        return BuiltParts, ()  # Another process builds its own models.


def _reuse_error(model: Any, part: Any) -> InputError:
    """Make the error for a part of an earlier model that trains in this one."""
    name = f"{type(part).__name__} {part.name!r}"
    if part is not model and not isinstance(part, keras.optimizers.Optimizer):
        outer = (
            layer.name
            for layer in model.layers
            if layer is part or any(item is part for item in (*layers_of(layer), *layer.weights))
        )
        name = f"layer {next(outer, part.name)!r}"
    return InputError(
        "`build` must make a new model at each call, because a trial must not start from the state "
        "of the previous one: make the optimizer and trainable layers in `build`, and load "
        "pretrained weights there. Layers that are made outside must have `trainable = False` "
        f"before the first call. Received: {name} again."
    )
