"""How a search makes its plan, with its first model and data before anything trains."""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.device.memory import gpu_visible
from kbatch.errors import InputError, OutOfMemoryError, PolicyUnsupported
from kbatch.memory.probe import MaxBatchExperiment, open_probes
from kbatch.memory.search import MEMORY_WINDOW, expected_bytes
from kbatch.memory.workload import Workload
from kbatch.records.json_codec import load_if_readable
from kbatch.records.notes import Note
from kbatch.records.training_run import PLAN_NAME, Plan
from kbatch.search.files import write_needed
from kbatch.search.first_updates import FEW, HALF, SOME, Updates, check_half
from kbatch.training import accumulation
from kbatch.training.accumulation.parts_check import parts_note, rows_to_compare
from kbatch.training.data.batches import InputMeter
from kbatch.training.data.training_data import TrainingData
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import ModelFacts, accumulation_of, replica_count
from kbatch.training.shared_graph import SharedGraph
from kbatch.training.state import kept_seeds
from kbatch.training.steps_per_execution import Steps, Training, steps_within, why_one

# Reasons of a plan whose model trains batches whole.
_WHOLE = ("own step", "compiled late")
# Every how many updates a trial measures the moments of its gradients.
MOMENTS_EVERY = 8
# No worker process runs the largest batch where it is expected to take at most this share of the
# memory limit: a quarter, because a peak may be twice as high as expected.
_SURE_SHARE = 0.25

Build = Callable[[str], keras.Model]  # Builds the model under a policy, also in another process.


class PolicyChosen(Exception):
    """The plan has another policy than the model was built under, which has not trained yet."""


class PlanHalved(keras_tuner.errors.FailedTrialError):
    """Memory ran out in training: the execution runs again by a plan of smaller micro-batches."""


def check_new(model: keras.Model, known: keras.Model | None) -> None:
    """Refuse a model that the build function has returned before."""
    if model is known:
        raise keras_tuner.errors.FatalValueError(
            "`build` must make a new model at each call, also for another trial or dtype policy: "
            "make the model and its optimizer inside of the function. "
            f"Received: the same {type(model).__name__} {model.name!r} again."
        )


@dataclasses.dataclass(eq=False)
class SearchPlan:
    """What all executions of a search have in common: its plan, or what that is made by."""

    batch_sizes: tuple[int, ...]
    micro_batch_size: int | Literal["auto"] | None = None
    dtype_policies: tuple[str, ...] = ("float32",)  # Empty where one is to be chosen.
    steps_per_execution: Steps = 1
    memory_limit_bytes: int | None = None  # None for what the device has.
    # A `fit` of the user's own may train several times, and look at each step.
    stock_fit: bool = True
    directory: Path | None = None  # Of the search; other processes find the plan there.
    plan: Plan | None = None

    def __post_init__(self):
        self.graph = SharedGraph()  # That of its trials.
        self._data: TrainingData | None = None  # The last ones, with what was read of them.
        self._meter: InputMeter | None = None
        self._parts_notes: dict[str, Note | None] = {}  # By fingerprint of the model.
        self._chosen: tuple[str, tuple[Note, ...]] | None = None  # Policy, and why.
        self._updates: Updates | None = None  # While a plan is made.
        self._spent_s = 0.0  # On the plan that is being made.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_data": None, "_meter": None}  # No tensor goes elsewhere.

    def data(self, given: TrainingData) -> TrainingData:
        """Return data with what was read of them before, if the last ones were the same."""
        if self._data is None or not self._data.is_same(given):
            self._data = given
        return self._data

    def meter(self) -> InputMeter:
        """Return the meter of all executions, traced once, which begins to count again."""
        self._meter = self._meter or InputMeter()
        self._meter.reset()
        return self._meter

    def read(self, directory: Path | None) -> Plan | None:
        """Return the plan of the search in a directory, which another process may have changed."""
        if directory != self.directory:
            self.directory, self.plan, self._chosen = directory, None, None
        if directory is not None:  # What was there before may have been deleted.
            kept = load_if_readable(Plan, directory / PLAN_NAME)
            if kept is None or self.plan is None or kept.number >= self.plan.number:
                self.plan = kept
        return self.plan

    @property
    def dtype_policy(self) -> str:
        """Policy to build a model under; of several the first."""
        if self.dtype_policies:
            return self.dtype_policies[0]
        if self.plan is not None and self.plan.dtype_policy is not None:
            return self.plan.dtype_policy
        if self._chosen is not None:
            return self._chosen[0]
        # The one that is likely to be chosen.
        return HALF if gpu_visible() else "float32"

    @property
    def _named_policy(self) -> str | None:
        """The policy that was given, None where it is a hyperparameter."""
        return self.dtype_policies[0] if len(self.dtype_policies) == 1 else None

    def size_of(self, rows: int) -> int | None:
        """Return how many of so many examples go through a device at once, None if not known."""
        if self.plan is not None:
            return _size_of(self.plan, rows)
        given = self.micro_batch_size
        return None if isinstance(given, str) else min(rows, given or rows)

    def settle_late(self) -> None:
        """Make the plan for a model that is compiled after it was built, where there is none."""
        if self.plan is None:
            policy, notes = self._named_policy, ()
            if not self.dtype_policies:
                policy = "float32"
                reason = "float16 needs a loss scale: compile the model where it is built"
                notes = (_float32_note(reason),)
                warnings.warn(notes[0], stacklevel=2)
            largest = self.batch_sizes[-1]
            self._keep(Plan(1, policy, None, "compiled late", largest, "", notes=notes))

    def settle(
        self, model: keras.Model, facts: ModelFacts, data: TrainingData, build: Build
    ) -> Plan:
        """Return the plan; make it where there is none, or none for so large a batch.

        Raises:
            PolicyChosen: If the model was built under another policy than the plan's.
        """
        known, began_s = self.plan, time.perf_counter()
        if known is not None and not self._outgrown(known):
            self._check_policy(model, known.dtype_policy)
            return known
        try:
            # The seeds of training are those that it would have without.
            with kept_seeds():
                plan = self._made(model, facts, data, build)
        finally:  # Also where it came no further than the policy.
            self._spent_s += time.perf_counter() - began_s
        plan = dataclasses.replace(plan, duration_s=self._spent_s)
        self._spent_s, self._updates = 0.0, None
        self._keep(plan)
        return plan

    def _made(
        self, model: keras.Model, facts: ModelFacts, data: TrainingData, build: Build
    ) -> Plan:
        known = self.plan
        policy, notes = self._policy(model, data, build)
        self._check_policy(model, policy)
        how = facts.cut_by_user
        if how is not None:
            most, reason = how.micro_batch_size, "given"
        elif self.micro_batch_size == "auto":
            most, reason, note = self._most_that_fit(model, data, facts, build)
            notes += (note,) if note else ()
        else:
            given = self.micro_batch_size, "given"
            most, reason = (None, "own step") if facts.own_step else given
        plan = Plan(
            number=1 if known is None else known.number + 1,
            dtype_policy=policy,
            micro_batch_size=most,
            reason=reason,
            largest_batch_size=self.batch_sizes[-1],
            model=model_fingerprint(model),
            notes=notes,
            step_s=self._step_s(model, data, most),
        )
        rows = facts.rows(self.batch_sizes[-1])
        if _size_of(plan, rows) < rows and not (how is not None and how.exact):
            note = self._parts_note(model, data, _size_of(plan, rows))
            plan = dataclasses.replace(plan, parts_equal=note is None, parts_note=note)
        return plan

    def cut(
        self, model: keras.Model, facts: ModelFacts, batch_size: int, data: TrainingData
    ) -> tuple[int, tuple[Note, ...]]:
        """Let a model train by the plan; return its micro-batch size, and what to know of it."""
        plan, given = self.plan, self.micro_batch_size
        assert plan is not None
        most = plan.micro_batch_size if isinstance(given, str) else given
        rows, notes, how = facts.rows(batch_size), plan.notes, facts.cut_by_user
        whole = how is None and (plan.reason in _WHOLE or facts.own_step)
        if whole and most is not None and most < rows:
            if self.micro_batch_size == "auto":
                raise _does_not_fit_whole(model, plan, rows, self.memory_limit_bytes)
            notes += (Note.of("own_step_whole", size=most),)
        if how is not None:
            size = min(how.micro_batch_size, rows)
        else:
            size = rows if whole else _size_of(plan, rows)
        if size == rows or (how is not None and how.exact):
            return size, notes
        if plan.parts_equal is None or plan.model != model_fingerprint(model):
            note = self._parts_note(model, data, size)
        else:
            note = plan.parts_note
            _build_on(model, data)
        known = accumulation_of(model)
        if known is None or known.micro_batch_size != size:
            accumulation.Accumulation(size, moments_every=MOMENTS_EVERY).apply(model)
        if note is not None:
            warnings.warn(note, stacklevel=2)
            notes += (note,)
        return size, notes

    def halve(self, facts: ModelFacts, rows: int, size: int) -> bool:
        """Change the plan where `size` of `rows` examples ran out of memory in training.

        Returns whether the execution may run again: not by a given size, nor where the batch goes
        through whole or by single examples already.
        """
        plan = self.read(self.directory)
        if plan is None or facts.cut_by_user is not None or self.micro_batch_size != "auto":
            return False
        whole = plan.reason in _WHOLE or facts.own_step
        most = rows - 1 if whole else size // 2
        if most < 1:
            return False
        if plan.micro_batch_size is None or most < plan.micro_batch_size:
            number = plan.number + 1
            ran_out = Note.of("memory_ran_out", before=size, after=most, plan=number)
            kept = (note for note in plan.notes if note.code == "float32_instead")
            plan = dataclasses.replace(
                plan,
                number=number,
                micro_batch_size=most,
                reason=plan.reason if whole else "cut",
                notes=tuple(kept) if whole else (*kept, ran_out),
            )
            self._keep(plan)
        return not whole

    def steps(self, model: Any, training: Training) -> tuple[int, tuple[Note, ...]]:
        """Return how many steps an execution of a training runs, and what to say of it."""
        asked, built = self.steps_per_execution, int(model.steps_per_execution)
        if asked != "auto" or built > 1:  # What `build` sets wins.
            return (asked if isinstance(asked, int) and built == 1 else built), ()
        reason = why_one(model, training.callbacks)
        if reason is None:
            if training.epoch_steps is None or replica_count(model) > 1 or not self.stock_fit:
                return 1, ()
            if self.plan is not None and self.plan.step_s is not None:
                size, (fixed_s, example_s) = training.batch_size, self.plan.step_s
                parts = -(-size // (self.size_of(size) or size))
                return steps_within(parts * fixed_s + size * example_s, training), ()
            reason = "no step could be timed apart from the data"
        return 1, (Note.of("one_step_an_execution", reason=reason),)

    def _chooses_steps(self, model: Any) -> bool:
        """Return whether steps may be chosen for a model, whatever its training."""
        asked = self.stock_fit and self.steps_per_execution == "auto"
        one = asked and int(model.steps_per_execution) == 1 and replica_count(model) == 1
        return one and why_one(model) is None

    def _updates_of(self, model: keras.Model, data: TrainingData) -> Updates:
        """Return the `Updates` of a model, made at the first call."""
        if self._updates is None or self._updates.model is not model:
            self._updates = Updates(model, data, counted=self._chooses_steps(model))
        return self._updates

    def _step_s(
        self, model: keras.Model, data: TrainingData, most: int | None
    ) -> tuple[float, float] | None:
        """Return the seconds of a step by itself and of an example, where steps are chosen."""
        if not self._chooses_steps(model):
            return None
        try:
            updates = self._updates_of(model, data)
            most = min(most or SOME, self.batch_sizes[-1])  # More may not fit: it is not cut yet.
            for rows in sorted({min(FEW, most), min(SOME, most)} - updates.seconds.keys()):
                updates.step_s(rows)
        except Exception:  # Training raises it again, where it is looked at.
            return None
        seconds = sorted(updates.seconds.items())
        (few, few_s), (most, most_s) = seconds[0], seconds[-1]
        example_s = max(0.0, most_s - few_s) / max(1, most - few)
        return max(0.0, few_s - few * example_s), example_s

    def _check_policy(self, model: keras.Model, policy: str | None) -> None:
        if not self.dtype_policies and policy != model.dtype_policy.name:
            raise PolicyChosen(policy)

    def _outgrown(self, plan: Plan) -> bool:
        """Return whether the search has larger sizes than the plan, of which nothing is known."""
        found = self.micro_batch_size == "auto" and plan.reason != "compiled late"
        larger = self.batch_sizes[-1] > plan.largest_batch_size
        return found and larger and most_in_memory(plan) is None

    def _keep(self, plan: Plan) -> None:
        self.plan = plan
        if self.directory is not None:
            write_needed(plan, self.directory / PLAN_NAME)

    def _policy(
        self, model: keras.Model, data: TrainingData, build: Build
    ) -> tuple[str | None, tuple[Note, ...]]:
        """Choose the policy of all trials; return it, and why where it is not mixed_float16."""
        if self.dtype_policies:
            return self._named_policy, ()
        if self.plan is not None:
            kept = tuple(note for note in self.plan.notes if note.code == "float32_instead")
            return self.plan.dtype_policy, kept
        if self._chosen is None:
            self._chosen = self._choose(model, data, build)
            self.graph.release(but=self._chosen[0])
        return self._chosen

    def _choose(
        self, model: keras.Model, data: TrainingData, build_half: Build
    ) -> tuple[str, tuple[Note, ...]]:
        """Try mixed_float16; take float32 where trials cannot train under it, or too slowly."""
        try:
            if replica_count(model) > 1:
                raise PolicyUnsupported(
                    "on several replicas Keras looks for overflows on the first one alone, and "
                    "those of another turn the weights into NaN"
                )
            full = half = self._updates_of(model, data)
            if model.dtype_policy.name != HALF:
                # Where it is chosen, trials train by the graph that is traced for it here.
                built = build_half(HALF)
                check_new(built, model)
                built = self.graph.model_for(built) if self.stock_fit else built
                half = self._updates_of(built, data)
            beside = None if full is half or gpu_visible() else full
            slow = check_half(half, beside, self.batch_sizes)
        except PolicyUnsupported as error:
            note = _float32_note(str(error))
            warnings.warn(note, stacklevel=2)
            return "float32", (note,)
        if slow is None:
            return HALF, ()
        self._updates = full
        return "float32", (_float32_note(slow),)

    def _most_that_fit(
        self, model: keras.Model, data: TrainingData, facts: ModelFacts, build: Build
    ) -> tuple[int, str, Note | None]:
        """Return how many examples fit at once, why it is no more, and what to say of it."""
        replicas, own, rows = facts.replicas, facts.own_step, facts.rows(self.batch_sizes[-1])
        if _surely_fits(self._updates_of(model, data), rows, self.memory_limit_bytes):
            return rows, "own step" if own else "fits", None
        policy = facts.dtype_policy
        workload = Workload(
            functools.partial(build, policy),
            data,
            policy,
            accumulate_below=0 if own else rows,
            moments_every=MOMENTS_EVERY,
            replicas=replicas,
        )
        with open_probes(
            workload,
            memory_limit_bytes=self.memory_limit_bytes,
            model=lambda: model,
            why_here=None if replicas == 1 else "replicas",
        ) as probes:
            # No answer is run again: where memory runs out later, the plan is halved.
            experiment = MaxBatchExperiment(probes, MEMORY_WINDOW, rows)
            found = experiment.largest() or experiment.search()
        most = experiment.size_of(found)
        if own or not experiment.is_bound(most) or most >= rows:
            return most, "own step" if own else "fits", None
        shared = (f" {one}" for one in experiment.facts.notes if one.code == "gpu_shared")
        more = next(shared, "")
        return most, "cut", Note.of("cut_to_fit", size=most, reason=found.reason, more=more)

    def _parts_note(self, model: keras.Model, data: TrainingData, size: int) -> Note | None:
        """Compare batches whole and in parts; say what differs."""
        try:
            _build_on(model, data)
        except InputError:
            # `fit` refuses most such data by itself, and says what is missing.
            return Note.of("parts_not_compared", found="no rows can be taken out of its data")
        kind = model_fingerprint(model)
        if kind not in self._parts_notes:
            rows = data.sample(rows_to_compare(size), model, fewest=1)
            self._parts_notes[kind] = parts_note(model, rows)
        return self._parts_notes[kind]


def most_in_memory(plan: Plan) -> int | None:
    """Return the most examples that fit in memory at once, None where its end was not met."""
    most = plan.micro_batch_size
    met = plan.reason in _WHOLE and most is not None and most < plan.largest_batch_size
    return most if met or plan.reason == "cut" else None


def _build_on(model: keras.Model, data: TrainingData) -> None:
    with model.distribute_strategy.scope():
        data.build(model)


def _size_of(plan: Plan, rows: int) -> int:
    """Return how many of the examples that a device has of a batch go through it at once."""
    most = plan.micro_batch_size
    if most is None or rows <= most or plan.reason in _WHOLE:
        return rows
    return most if plan.reason == "given" else equal_parts(rows, most)


def _float32_note(reason: str) -> Note:
    return Note.of("float32_instead", policy=HALF, reason=reason.strip().rstrip("."))


def _surely_fits(updates: Updates, rows: int, limit_bytes: int | None) -> bool:
    """Return whether updates of a few examples show that so many fit, by far."""
    facts, measured = updates.run.facts(limit_bytes), {}
    most = _SURE_SHARE * facts.limit_bytes
    # Weights and slots, and gradients beside them.
    expected: float | None = 2 * facts.variables_bytes
    for size in sorted({min(FEW, rows), min(SOME, rows)}):
        if expected is None or expected > most or (peak := updates.peak_bytes(size)) is None:
            return False
        measured[size] = peak
        expected = expected_bytes(measured, min(SOME, rows), facts.held_bytes)
    expected = expected_bytes(measured, rows, facts.held_bytes)
    return expected is not None and expected <= most


def _does_not_fit_whole(
    model: Any, plan: Plan, rows: int, limit_bytes: int | None
) -> OutOfMemoryError:
    most = plan.micro_batch_size
    what = "A model with a `train_step` of your own"
    cut = f"let the build function call `kbatch.accumulate_gradients(model, {most}, exact=True)`"
    if plan.reason == "compiled late":
        what = "A model that is compiled after it was built"
        cut = "compile it in the build function, so that they can be cut"
    # A plan that was changed knows which size ran out, and not whether one example less fits.
    measured = plan.number == 1
    known = f"the largest batch that fits has {most}" if measured else f"more than {most} do not"
    return OutOfMemoryError(
        f"{what} trains batches whole, and {rows} examples do not fit in memory at once; {known}. "
        f"Leave out larger `batch_sizes`, or {cut}. "
        f"Received: a batch of {rows} examples, model of class {type(model).__name__}.",
        examples=rows,
        fitting_examples=most if measured else None,
        limit_bytes=limit_bytes,
    )
