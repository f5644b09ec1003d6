"""Batch size as a hyperparameter: the HyperModel that wraps a person's own."""

import contextlib
import copy
import functools
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, check_size_or_auto
from kbatch.analysis.learning_rate import (
    FACTOR_NAME,
    FACTORS,
    FOLLOWERS,
    LearningRateScaling,
    check_followers,
    check_rule,
)
from kbatch.device.failures import refusal
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError, OutOfMemoryError, PolicyUnsupported, RecordError
from kbatch.library_internals import build_again, metrics_in_float32
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import RECORD_NAME, SearchRecord
from kbatch.search import BASE_BATCH_SIZE
from kbatch.search.execution import Execution, give_own_paths
from kbatch.search.files import TrialFiles, completed_trials, recorded_search, trial_files
from kbatch.search.identity import model_facts
from kbatch.search.plan import MOMENTS_EVERY, PolicyChosen, SearchPlan, check_new
from kbatch.search.timed_fit import ExecutionSettings
from kbatch.training import accumulation
from kbatch.training.build_function import BuildFunction, as_hypermodel, has_stock_fit
from kbatch.training.data.training_data import FitCall
from kbatch.training.dtype_policy import (
    check_active_policy,
    check_dtype_policies,
    check_own_dtypes,
    dtype_policy_scope,
)
from kbatch.training.learning_rate import scale_model
from kbatch.training.model import ModelFacts, check_trainable
from kbatch.training.state import check_seed, seeded, updates_made
from kbatch.training.steps_per_execution import Steps

_LARGEST_VALIDATION_BATCH = 256
# Seeds that are drawn: few enough to be read aloud.
_SEEDS = 10_000


class BatchSizeHyperModel(keras_tuner.HyperModel):
    """Makes batch size a hyperparameter of any keras-tuner search.

    It works with every tuner. Each trial is built under the dtype policy, its learning rate follows
    the batch size, batches above `micro_batch_size` are accumulated, and what happened is written
    to `kbatch.json` beside keras-tuner's own files, for `kbatch.load_study`.

    Example:

    >>> hypermodel = kbatch.BatchSizeHyperModel(
    ...     build, kbatch.powers_of_two(16, 1024), micro_batch_size=128, seed=0)
    >>> tuner = keras_tuner.GridSearch(hypermodel, "val_accuracy", directory="results")
    >>> tuner.search(x, y, validation_split=0.2, epochs=10)
    >>> kbatch.plot_trials(kbatch.load_study(tuner))

    Args:
        build: A function that builds a compiled model, of keras-tuner's `hp` or of nothing, or a
            `keras_tuner.HyperModel`, whose own `fit` is called if it has one. It may read
            `hp.get("batch_size")`. If that `fit` compiles the model, or trains one that is not
            compiled, batches go through whole and in float32.
        batch_sizes: Batch sizes to try, in examples: ascending integers.
        micro_batch_size: Examples that go through a device at once; a larger batch is accumulated.
            Under a `distribution_strategy` each replica has its part of the batch, and this is of
            that part. `"auto"` takes the most that fit into memory, which is found once, before the
            first training. Where memory runs out in training after all, later trainings have half
            of it. None for the whole batch at once. A trial measures the gradient noise scale where
            its batch is cut, so a size of at most half the batch has it in every trial. A model
            that `accumulate_gradients` has cut in the build function is left as it is, and one with
            a `train_step` of its own goes through whole.
        dtype_policy: Name of a Keras dtype policy. Several make it a hyperparameter
            (`"dtype_policy"`). None for `"mixed_float16"`, or float32 where an update cannot be
            made under that, takes more than twice as long on a processor, or several replicas
            share a batch: Keras looks for overflows on the first of them alone.
        learning_rate_scaling: How the learning rate follows the batch size: `"linear"`, `"sqrt"` or
            None (it does not). `"auto"` takes what suits the optimizer: linear for SGD, the square
            root for Adam and its kin, None for others.
        base_batch_size: Batch size that the learning rate and other settings of the model suit. It
            is always tried, and a study compares the others with it. None for 32, Keras's default,
            or the nearest size where 32 lies outside `batch_sizes`; a search that goes on keeps
            the one that it had.
        follow_batch_size: Which other settings keep their timescale in examples, with any rule or
            none. `"beta_2"`, the decay of Adam's second moment (`rho` of RMSprop),
            `"batch_norm_momentum"`, that of moving statistics, and `"ema_momentum"`, that of an
            average of the weights (`use_ema`), are taken to the power of the ratio of the batch
            sizes. `"weight_decay"` of any optimizer is multiplied by that ratio and divided by the
            factor of the learning rate. `()` leaves all as they are.
        steps_per_execution: Train steps that Keras starts at once, which changes how long they take
            and nothing else. `"auto"` times a few steps of the first model, which leave nothing
            behind, so that an execution takes about 100 ms. It is 1 where the model is run eagerly
            or on several replicas, has a `fit` or a `train_step` of its own, or where a callback
            acts on train batches. Beside `steps_per_epoch` it is a divisor of that, since Keras
            runs whole executions. None leaves it to the build function, and so does the rest
            where that sets more than 1.
        memory_limit_bytes: Memory that `"auto"` may take. None for what TensorFlow has of the GPU,
            on a CPU half of what the host and its control group leave.
        seed: Seed of weights and shuffling; a further execution of a trial adds its number. If
            None, `BatchSizeTuner` draws one for the search, and other tuners train from others in
            each trial.

    Raises:
        TypeError: If `build` cannot build or a size is no integer.
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
        self._inner = as_hypermodel(build)
        # An inner HyperModel that is not tunable keeps to its defaults; the batch size is tuned.
        super().__init__(name=self._inner.name)
        self.stock_fit = has_stock_fit(self._inner)
        self._given_sizes = check_batch_sizes(batch_sizes)
        if base_batch_size is not None:
            base_batch_size = check_size(base_batch_size, "base_batch_size")
        self._chosen_base = base_batch_size
        smallest, largest = self._given_sizes[0], self._given_sizes[-1]
        self._set_base(base_batch_size or min(max(BASE_BATCH_SIZE, smallest), largest))
        self.micro_batch_size: Steps = check_size_or_auto(micro_batch_size, "micro_batch_size")
        self.memory_limit_bytes = check_memory_limit(memory_limit_bytes)
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
        self._begin()

    def _begin(self) -> None:
        """Begin as if nothing had been searched."""
        self._search = SearchPlan(
            self.batch_sizes,
            self.micro_batch_size,
            self.dtype_policies,
            self.steps_per_execution,
            self.memory_limit_bytes,
            stock_fit=self.stock_fit,
        )
        # The first model that was built: its hyperparameters, and what it is.
        self._first: tuple[dict[str, Any], dict[str, str]] | None = None
        # The model that trained last, where it still lives.
        self._trained: weakref.ref[Any] | None = None
        # The model that was built last, and what it was scaled by.
        self._scaled: tuple[weakref.ref[Any], LearningRateScaling | None] | None = None
        # keras-tuner executes a trial several times with one object of hyperparameters, without the
        # number: it follows from that object, as long as all executions before it ended well.
        self._executed: tuple[keras_tuner.HyperParameters | None, int] = None, 0
        self.graph = self._search.graph  # Of all trials whose models train alike.

    def of_search(self) -> "BatchSizeHyperModel":
        """Return one with the same settings for a search of its own, which shares nothing."""
        found = copy.copy(self)
        del vars(found)["build"]  # keras-tuner's way to this one's.
        keras_tuner.HyperModel.__init__(found, self.name)
        found._begin()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trained": None, "_scaled": None}

    @property
    def settings(self) -> dict[str, object]:
        """What holds for all trials of the search, by argument name."""
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
        self.batch_sizes = tuple(sorted({*self._given_sizes, size}))

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        """Build the model of a trial; keras-tuner calls it."""
        batch_size, named = self._declare(hp)
        policy = named or self._search.dtype_policy
        try:
            with _reads_batch_size(hp) as read:
                model, policy = self._built(hp, policy)
        except Exception:
            self._executed = None, 0
            raise
        trained = self._trained and self._trained()
        if model is trained and updates_made(model):
            check_new(model, trained)
        if self._is_late(model):
            # Nobody knows whether its loss will be scaled.
            return model if named else self._built(hp, "float32")[0]
        try:
            check_trainable(model)
            check_active_policy(model, policy)
        except (TypeError, ValueError) as error:
            raise keras_tuner.errors.FatalValueError(str(error)) from error
        if self._first is None:
            described = model_facts(model, with_policy=bool(self.dtype_policies))
            self._first = dict(hp.values), described
        base_model = None
        if read and batch_size != self.base_batch_size:
            base = hp.copy()
            base.values["batch_size"] = self.base_batch_size
            base_model, _ = self._built(base, policy)
        scaling = scale_model(
            model,
            batch_size=batch_size,
            base_batch_size=self.base_batch_size,
            rule=self.learning_rate_scaling,
            follow_batch_size=self.follow_batch_size,
            factor=hp.get(FACTOR_NAME) if self.searches_rate else 1.0,
            base_model=base_model,
        )
        self._scaled = weakref.ref(model), scaling
        facts = ModelFacts(model)
        # Keras averages the first batch over replicas, and ends an execution by one iterator.
        if batch_size % facts.replicas:
            raise keras_tuner.errors.FatalValueError(
                "Keras shares a batch evenly among replicas: give `batch_sizes` that are multiples "
                f"of {facts.replicas}. Received: batch_size={batch_size}."
            )
        asked = self.steps_per_execution
        steps = max(int(model.steps_per_execution), asked if isinstance(asked, int) else 1)
        if facts.replicas > 1 and steps > 1:
            raise keras_tuner.errors.FatalValueError(
                "Keras runs one step an execution on several replicas: leave out "
                f"`steps_per_execution`. Received: {steps} on {facts.replicas} replicas."
            )
        if facts.cut_by_user is None:
            accumulation.sum_sparse_gradients(model)
            rows = facts.rows(batch_size)
            size = self._search.size_of(rows)
            if size is not None and size < rows and not facts.own_step:
                accumulation.Accumulation(size, moments_every=MOMENTS_EVERY).apply(model)
        return model

    def declare_hyperparameters(self, hp: keras_tuner.HyperParameters) -> None:
        """Declare the batch size and what the wrapped HyperModel declares; for keras-tuner."""
        self._declare(hp)
        self._inner.declare_hyperparameters(hp)

    def fit(self, hp: keras_tuner.HyperParameters, model: keras.Model, *args: Any, **kwargs: Any):
        """Train the model of a trial and record it; keras-tuner calls it.

        It takes what `BatchSizeTuner.search` takes, and returns what the wrapped `fit` returns,
        with `samples_per_second` among the metrics.
        """
        try:
            call = FitCall.of_search(args, kwargs, stock_fit=self.stock_fit)
            return self._train(hp, model, call)
        except BaseException as error:
            self.graph.release()  # Nothing of a training that failed is kept.
            self._executed = None, 0
            ended = self._end_of(error)
            if ended is None:
                raise
            # What kbatch says itself needs no place in it.
            own = isinstance(error, (InputError, RecordError))
            raise ended from (None if own else error)

    def _train(self, hp: keras_tuner.HyperParameters, model: keras.Model, call: FitCall) -> Any:
        """Train a model as the plan of the search says, and record it."""
        files, number, policy = trial_files(call.callbacks), self._number(hp), self._declare(hp)[1]
        files.check_search(self.settings)
        notes = give_own_paths(call.callbacks, trial_id=files.trial_id, execution=number)
        search = self._search
        search.batch_sizes = self.batch_sizes  # Those of a search that goes on may be more.
        search.read(files.project)
        if self._is_late(model):
            search.settle_late()
            notes = (Note.of("compiled_late"), *notes)
        self._check_built(hp, model, policy)
        settings = ExecutionSettings(
            number=number,
            seed=self._seed(hp),
            batch_size=self._declare(hp)[0],
            validation_batch_size=self.validation_batch_size,
            metrics=files.objective_names if self.stock_fit else (),
            to_target="seconds_to_target" in files.measured_names,
            objective=files.objective,
            objective_parts=files.objective_parts,
            notes=notes,
            search=search,
        )
        results, chosen = None, None
        try:
            results = self._execute(hp, model, files, settings, call)
        except PolicyChosen as error:
            chosen = str(error)
        if chosen is not None:  # It has not trained, and is built again under that policy.
            model = build_again(files.tuner, hp)
            self._check_built(hp, model, chosen)
            results = self._execute(hp, model, files, settings, call)
        self._executed = hp, (number + 1) % files.executions
        return results

    def _execute(
        self,
        hp: keras_tuner.HyperParameters,
        model: keras.Model,
        files: TrialFiles,
        settings: ExecutionSettings,
        call: FitCall,
    ) -> Any:
        self._trained = weakref.ref(model)
        built, scaling = self._scaled or (self._trained, None)
        scaling = scaling if built() is model else None
        model = self.graph.model_for(model) if self.stock_fit else model
        # What builds the model under a policy, also in another process.
        build = functools.partial(_built_to_probe, self._inner, hp, self._seed(hp))
        execution = Execution(model, settings, files, build, scaling)
        for callback in call.callbacks:
            if hasattr(callback, "follow_trial"):  # A `LivePlot`, without what it draws by.
                callback.follow_trial(files, number=settings.number, so_far=execution.so_far)
        return execution.run(self._inner, hp, call)

    def _end_of(self, error: BaseException) -> Exception | None:
        """Return the error that ends the search or the trial; None where `error` itself does."""
        said = str(error) if isinstance(error, (InputError, RecordError)) else None
        # A size that has trained shows that others may.
        if said is None and not any(completed_trials(self._search.directory)):
            said = refusal(error)
        if said is not None:
            return keras_tuner.errors.FatalValueError(said)
        if isinstance(error, OutOfMemoryError):
            return keras_tuner.errors.FailedTrialError(
                f"{error} keras-tuner ends a search after three failed trials in a row, unless its "
                "oracle is given a larger `max_consecutive_failed_trials`."
            )
        return None

    def _described(self, project: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Describe the model built with the values of the identity, or with the first ones."""
        known = recorded_search(project)
        values = (known and known.hyperparameters) or None
        if self._first is None or (values is not None and values != self._first[0]):
            hp = keras_tuner.HyperParameters()
            hp.values = dict(values or {})
            named = self._declare(hp)[1]
            model, _ = self._built(hp, named or self._search.dtype_policy)
            described = model_facts(model, with_policy=bool(self.dtype_policies))
            self._first = dict(hp.values), described
        return self._first

    def _restore(self, project: Path | None) -> None:
        """Restore what an earlier run of the search derived or drew, and its plan; draw a seed."""
        # Adding sizes must not change the learning rates of the trials there, by another base
        # size, or the batches that all of them are validated with.
        found = project and load_if_readable(SearchRecord, project / RECORD_NAME)
        # Where it is damaged, the reload says what is wrong with it.
        settings: Mapping[str, Any] = found.settings if found else {}
        if self.seed is None:
            self.seed = settings.get("seed")
        if self.seed is None:
            # Executions are compared by pairs with a seed in common.
            self.seed = secrets.randbelow(_SEEDS)
        if project is None or found is None:
            return
        self._search.read(project)
        self.validation_batch_size = settings.get(
            "validation_batch_size", self.validation_batch_size
        )
        # Another search, which is refused, is named by its own base size.
        extends = set(settings.get("batch_sizes", ())) <= set(self.batch_sizes)
        if extends and self._chosen_base is None:
            self._set_base(settings.get("base_batch_size", self.base_batch_size))

    def _number(self, hp: keras_tuner.HyperParameters) -> int:
        """Return the number of the execution that `hp` comes to next, from 0."""
        known, number = self._executed
        return number if hp is known else 0

    def _built(self, hp: keras_tuner.HyperParameters, policy: str) -> tuple[Any, str]:
        """Build a model; in float32 where it cannot be had under its policy."""
        try:
            return _built(self._inner, hp, policy, self._seed(hp)), policy
        except PolicyUnsupported:
            return _built(self._inner, hp, "float32", self._seed(hp)), "float32"

    def _check_built(self, hp: Any, model: keras.Model, policy: str | None) -> None:
        """Raise why a model could not be built under the policy that it is to train under."""
        if policy is not None and model.dtype_policy.name != policy:
            _built(self._inner, hp, policy, self._seed(hp))

    def _is_late(self, model: keras.Model) -> bool:
        """Return whether a `fit` of the user's own compiles a model, or trains it by itself."""
        # A size to cut to and a rule for the rate, where given by name, need an optimizer and a
        # loss at once: a model without them is refused then, and not taken for a late one.
        sized = isinstance(self.micro_batch_size, int)
        ruled = self.learning_rate_scaling not in (None, "auto")
        compiled = getattr(model, "compiled", None) is not False  # None where it is no model.
        return not (self.stock_fit or sized or ruled or compiled)

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

    def _seed(self, hp: keras_tuner.HyperParameters) -> int | None:
        return None if self.seed is None else self.seed + self._number(hp)


def _built(inner: Any, hp: Any, policy: str, seed: int | None) -> Any:
    """Build a model under a policy."""
    with dtype_policy_scope(policy), seeded(seed):
        model = inner.build(hp)
    check_own_dtypes(model, policy)
    if isinstance(model, keras.Model) and not hasattr(model, "optimizer"):
        model.optimizer = None  # It is not compiled yet.
    metrics_in_float32(model)
    return model


def _built_to_probe(inner: Any, hp: Any, seed: int | None, policy: str) -> keras.Model:
    return accumulation.sum_sparse_gradients(_built(inner, hp, policy, seed))


@contextlib.contextmanager
def _reads_batch_size(hp: keras_tuner.HyperParameters) -> Iterator[list[str]]:
    """List "batch_size" as often as its value is read."""
    found: list[str] = []

    class Values(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if key == "batch_size":
                found.append(key)
            return super().__getitem__(key)

    hp.values = Values(hp.values)
    try:
        yield found
    finally:
        hp.values = dict(hp.values)
