"""The plan of a search: when it is made and read, and what changes it."""

import dataclasses
import functools
import json
import weakref
from typing import ClassVar

import keras
import keras_tuner
import own_steps
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.errors import OutOfMemoryError
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import PLAN_NAME, Plan
from kbatch.search.plan import (
    choose_xla,
    halved,
    micro_batch_size,
    most_in_memory,
    notes_on_size,
    timed_line,
)
from kbatch.search.runs import TrialRuns
from kbatch.training.data.training_data import TrainingData
from kbatch.training.model import ModelFacts, installed_step, is_compiled
from kbatch.training.step_call import StepCall
from kbatch.training.steps_per_execution import set_steps

layers = keras.layers
PLAN = Plan(1, "float32", 32, "fits", 32, "")


def small(**compile_arguments):
    """A model whose step is traced faster than one with Adam."""
    return models.mlp(optimizer="sgd", **compile_arguments)


def search(directory, build=small, sizes=(8, 16, 32), *, settings=None, **arguments):
    chosen = {"micro_batch_size": "auto", "dtype_policy": "float32"} | (settings or {})
    tuner = searches.search(directory, searches.hypermodel(build, sizes, **chosen), **arguments)
    return kbatch.load_study(tuner)


def quick(directory, *arguments, fit=None, **keywords):
    """Search for one epoch of 48 rows without validation."""
    fit = {"epochs": 1, "validation_data": None} | (fit or {})
    given = {"objective": "accuracy", "fit": fit, "data": models.rows(48)}
    return search(directory, *arguments, **(given | keywords))


def plant(directory, **changed):
    """Write a plan into the directory of a search."""
    folder = directory / "search"
    folder.mkdir(parents=True)
    write_record(dataclasses.replace(PLAN, **changed), folder / PLAN_NAME)


def same_results(study, other):
    for mine, theirs in zip(study.trials, other.trials, strict=True):
        assert mine.hyperparameters == theirs.hyperparameters
        for name, value in theirs.metrics.items():
            if name != "samples_per_second":
                assert mine.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name


def runs(study):
    return [run for trial in study.trials for run in trial.executions]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Trials of two sizes with a learning rate of each size."""
    return search(tmp_path_factory.mktemp("auto"), sizes=(8, 32))


@pytest.mark.parametrize("strategy", ["grid", "race"])
def test_search_makes_the_plan_before_the_first_trial(monkeypatch, tmp_path, strategy):
    run_trial, known = kbatch.BatchSizeTuner.run_trial, []

    def watched(tuner, *arguments, **keywords):
        known.append((tmp_path / "search" / PLAN_NAME).exists())
        run_trial(tuner, *arguments, **keywords)

    monkeypatch.setattr(kbatch.BatchSizeTuner, "run_trial", watched)
    more = {"strategy": strategy, "max_trainings": 2} if strategy == "race" else {}
    quick(tmp_path, models.stock, (8, 16), kind=kbatch.BatchSizeTuner, **more)
    assert known == [True, True]


@pytest.mark.parametrize("kind", [keras_tuner.GridSearch, kbatch.BatchSizeTuner])
def test_search_writes_no_failure_of_a_trial_that_completes(monkeypatch, tmp_path, kind):
    """Its model is built before the policy of the plan is known, under keras-tuner's tuners."""
    monkeypatch.setattr("kbatch.search.first_updates.slowdown", lambda *_: 1.0)
    write, statuses = kbatch.search.files.TrialFiles.write, []

    def watched(files, number, record):
        statuses.append(record.status)
        write(files, number, record)

    monkeypatch.setattr("kbatch.search.files.TrialFiles.write", watched)
    settings = {"dtype_policy": None}
    (run,) = runs(quick(tmp_path, models.stock, (8,), kind=kind, settings=settings))
    assert run.dtype_policy == "mixed_float16"
    assert statuses == ["running", "completed"]


class Untracked(layers.Layer):
    """Counts its training calls in a variable and in Python. Keras tracks neither."""

    def __init__(self):
        super().__init__()
        self.calls, self.count = tf.Variable(0.0, trainable=False), 0

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
            self.count += 1
        return x


class Annealed(keras.losses.Loss):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, y, y_pred):
        self.calls.assign_add(1.0)
        return keras.losses.sparse_categorical_crossentropy(y, y_pred)


class Begins(keras.callbacks.Callback):
    """Notes the state of a model that Keras does not track when its training begins."""

    states: ClassVar = []

    def on_train_begin(self, logs=None):
        layer, loss = self.model.layers[0], self.model.loss
        self.states.append((float(layer.calls), layer.count, float(loss.calls)))


@pytest.mark.parametrize(
    ("kind", "eager", "size"),
    [(keras_tuner.GridSearch, False, "auto"), (kbatch.BatchSizeTuner, True, 4)],
)
def test_plan_leaves_the_state_of_a_fresh_build(tmp_path, kind, eager, size):
    def build():
        parts = [layers.Input((8,)), Untracked(), layers.Dense(3, activation="softmax")]
        return models.compiled(parts, "sgd", Annealed(), run_eagerly=eager)

    Begins.states.clear()
    settings = {"dtype_policy": None, "micro_batch_size": size}
    more = {"objective": "loss", "executions_per_trial": 2, "kind": kind}
    quick(tmp_path, build, (16,), settings=settings, fit={"callbacks": [Begins()]}, **more)
    assert Begins.states == [(0.0, 0, 0.0)] * 2


def test_plan_is_made_once_and_one_that_fits_has_whole_batches(study):
    plan = study.plan
    assert (plan.dtype_policy, plan.largest_batch_size) == ("float32", 32)
    assert (plan.micro_batch_size, plan.reason, plan.parts_equal) == (32, "fits", None)
    first, later = runs(study)
    assert first.learning_rate != later.learning_rate
    for run in runs(study):
        assert run.plan == 1
        assert run.micro_batch_size == run.batch_size == run.batch_size_seen
        assert (run.status, run.notes, run.most_in_memory) == ("completed", (), None)


def test_plan_changes_no_result(study, tmp_path):
    same_results(study, search(tmp_path, sizes=(8, 32), settings={"micro_batch_size": 32}))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return the study of a search with a micro-batch of 4."""
    return quick(tmp_path_factory.mktemp("given"), sizes=(32,), settings={"micro_batch_size": 4})


def test_search_reads_an_existing_plan(tmp_path, given):
    plant(tmp_path, micro_batch_size=4, reason="cut")
    later = quick(tmp_path, sizes=(32,))
    assert [run.micro_batch_size for run in runs(later)] == [4]
    assert later.plan == dataclasses.replace(PLAN, micro_batch_size=4, reason="cut")
    same_results(later, given)


def test_plan_of_a_given_size_compares_parts_with_the_whole(given):
    assert (given.plan.micro_batch_size, given.plan.reason) == (4, "given")
    assert (given.plan.parts_equal, given.plan.parts_note) == (True, None)


def test_micro_batch_size_makes_equal_parts():
    plan = dataclasses.replace(PLAN, micro_batch_size=12, reason="cut")
    assert micro_batch_size(plan, ModelFacts(models.linear()), 32) == 11
    assert most_in_memory(plan) == 12


def test_search_with_overwrite_makes_another_plan(tmp_path):
    settings = {"micro_batch_size": "auto", "dtype_policy": "float32"}
    hypermodel, plans = searches.hypermodel(models.stock, (16,), **settings), []
    for _ in range(2):
        tuner = searches.quick(tmp_path, hypermodel, overwrite=True)
        plans.append(kbatch.load_study(tuner).plan)
    assert [plan.number for plan in plans] == [1, 1]
    assert plans[0].duration_s != plans[1].duration_s


def test_search_with_larger_sizes_makes_another_plan(tmp_path):
    plant(tmp_path, largest_batch_size=16, micro_batch_size=16)
    found = quick(tmp_path, sizes=(16, 32))
    assert (found.plan.number, found.plan.micro_batch_size) == (2, 32)
    assert {run.plan for run in runs(found)} == {2}


class Held:
    """An object that a step out of memory holds. Its references are in `HELD`."""


HELD = []
OUT_OF_MEMORY = tf.errors.ResourceExhaustedError, "OOM when allocating tensor"


def run_out(*_, error):
    held = Held()
    HELD.append(weakref.ref(held))
    kind, text = error
    raise kind(None, None, text)


class RunsOut(keras.callbacks.Callback):
    """Lets a step run out of memory, as often as it has lives."""

    def __init__(self, file, step=2, lives=1, error=OUT_OF_MEMORY):
        super().__init__()
        self.file, self.step, self.lives, self.error = file, step, lives, error

    def on_train_batch_begin(self, batch, logs=None):
        before = len(self.file.read_text()) if self.file.exists() else 0
        if batch == self.step and before < self.lives:
            self.file.write_text("x" * (before + 1))
            self.model.optimizer.learning_rate = 7.0  # As a schedule by callback would.
            self.model.train_function = functools.partial(run_out, error=self.error)


class Counts(keras.callbacks.Callback):
    """Counts the epochs and batches that it has seen, into a file at the end."""

    def __init__(self, file):
        super().__init__()
        self.file, self.batches, self.epochs = file, 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_end(self, logs=None):
        with self.file.open("a") as lines:
            lines.write(f"{self.batches} {self.epochs}\n")


def test_search_out_of_memory_repeats_the_run_with_half(monkeypatch, tmp_path):
    train, alive = TrialRuns.run, []

    def watched(*arguments, **named):
        alive.append(bool(HELD) and HELD[-1]() is not None)
        return train(*arguments, **named)

    monkeypatch.setattr(TrialRuns, "run", watched)
    fit = {"callbacks": [Counts(tmp_path / "counts"), RunsOut(tmp_path / "lives")]}
    settings = {"dtype_policy": "mixed_float16", "base_batch_size": 16}
    fit |= {"epochs": 2}
    tuner = {"kind": kbatch.BatchSizeTuner, "fit": fit}
    study = quick(tmp_path / "auto", models.Locked(small), (16,), settings=settings, **tuner)
    assert list(tmp_path.glob("**/*.h5"))
    (run,) = runs(study)
    assert (run.status, run.batch_size, run.batch_size_seen) == ("completed", 16, 16)
    assert (run.micro_batch_size, run.most_in_memory, run.plan) == (8, 8, 2)
    (note,) = [note for note in run.notes if note.code == "memory_ran_out"]
    assert note.values == {"before": 16, "after": 8, "plan": 2}
    assert run.examples_seen == 2 * 48
    assert len(run.epochs) == 2
    # Its callbacks are new ones: they counted only the 6 batches of the repeated run.
    assert (tmp_path / "counts").read_text() == "6 [0, 1]\n"
    # Nothing holds memory of the failed step when the run begins again.
    assert alive == [False] * 2
    settings["micro_batch_size"] = 8
    fit = {"epochs": 2}
    same_results(study, quick(tmp_path / "given", sizes=(16,), settings=settings, fit=fit))


def test_search_out_of_memory_under_grid_search_halves_later_trials(tmp_path):
    fit = {"callbacks": [RunsOut(tmp_path / "lives")]}
    study = quick(tmp_path / "auto", models.Locked(small), (16, 32), fit=fit)
    failed, completed = runs(study)
    assert (failed.status, failed.micro_batch_size, failed.plan) == ("out_of_memory", 16, 1)
    assert "OOM when allocating" in failed.failure
    assert failed.updates == 2
    assert (completed.status, completed.micro_batch_size, completed.plan) == ("completed", 8, 2)


@pytest.mark.slow
def test_search_device_error_repeats_the_run_with_half(tmp_path):
    error = tf.errors.InternalError, "Failed to execute XLA runtime executable: run time error"
    fit = {"callbacks": [RunsOut(tmp_path / "lives", error=error)]}
    study = quick(tmp_path, models.Locked(small), (16,), kind=kbatch.BatchSizeTuner, fit=fit)
    (run,) = runs(study)
    assert (run.status, run.micro_batch_size, run.plan) == ("completed", 8, 2)


def test_search_warns_once_if_parts_differ(tmp_path):
    with pytest.warns(UserWarning) as said:
        quick(tmp_path, models.normalised, (16, 32), settings={"micro_batch_size": 8})
    assert sum("instead of the whole batch" in str(w.message) for w in said) == 1


def test_search_one_example_out_of_memory_ends_the_trial(tmp_path):
    fit = {"callbacks": [RunsOut(tmp_path / "lives", step=0, lives=99)]}
    arguments = {"kind": kbatch.BatchSizeTuner, "fit": fit}
    study = quick(tmp_path / "auto", models.Locked(small), (2,), **arguments)
    (run,) = runs(study)
    assert (run.status, run.micro_batch_size) == ("out_of_memory", 1)
    assert (tmp_path / "lives").read_text() == "xx"


FITS = Plan(1, "float32", 64, "fits", 64, "")


def test_halved_keeps_the_smallest_size_or_a_given_size():
    facts = ModelFacts(models.mlp())
    once = halved(FITS, facts, rows=64, size=64)
    twice = halved(once, facts, rows=64, size=32)
    # Later runs validate on the same blocks of examples as earlier ones.
    first = FITS.micro_batch_size
    assert once.validation_batch_size == twice.validation_batch_size == first
    assert halved(twice, facts, rows=64, size=64) == twice  # Another process found less before.
    assert (twice.number, twice.micro_batch_size, twice.reason) == (3, 16, "cut")
    assert [note.values["before"] for note in twice.notes] == [32]
    assert halved(twice, facts, rows=64, size=1) is None
    given = dataclasses.replace(FITS, reason="given", micro_batch_size=32)
    assert halved(given, facts, rows=64, size=32) is None


def test_halved_own_step_leaves_larger_sizes_out():
    model = own_steps.gan()
    facts, before = ModelFacts(model), dataclasses.replace(FITS, reason="own_step")
    assert micro_batch_size(before, facts, 32) == 32
    assert notes_on_size(before, "auto", model, 32) == ()
    after = halved(before, facts, rows=32, size=32)
    assert (after.number, after.micro_batch_size, most_in_memory(after)) == (2, 31, 31)
    assert notes_on_size(after, "auto", model, 8) == ()
    with pytest.raises(OutOfMemoryError, match="More than 31 examples"):
        notes_on_size(after, "auto", model, 32)


def wide():
    model = keras.Sequential([layers.Input((8,)), layers.Dense(2**19)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_search_memory_limit_below_the_weights_fails_the_trial(tmp_path):
    """Another trial of the search may have a smaller model."""
    settings = {"memory_limit_bytes": 4 * 2**20}
    (run,) = runs(quick(tmp_path, models.Locked(wide), (4,), settings=settings, objective="loss"))
    assert run.status == "out_of_memory"
    assert "18.0 MiB" in run.failure
    told = json.loads((tmp_path / "search/trial_0000/trial.json").read_text())
    assert told["status"] == "FAILED"
    assert "max_consecutive_failed_trials" in told["message"]


class Texts(layers.Layer):
    """XLA cannot compile it."""

    def call(self, x):
        return x + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)


@pytest.mark.parametrize(
    ("inner", "plain_s", "xla_s", "left_s", "tried", "taken"),
    [
        (list, 5.0, 0.0, None, False, False),  # XLA may save 3.75 s, and takes 0.6 s for 7 shapes.
        (list, 11.0, 0.0, None, False, False),  # The mean gain, 1 s, does not pay for a trial.
        (list, 1e6, 0.0, 5.0, False, False),
        (lambda: [layers.Dense(2) for _ in range(9)], 10.0, 0.0, None, False, False),  # 22 weights.
        pytest.param(list, 1e6, 1e6, None, True, False, marks=pytest.mark.slow),
        (list, 1e6, 1.0, None, True, True),
        (lambda: [Texts()], 1e6, 1.0, None, True, False),
    ],
    ids=["short", "no trial", "budget", "deep", "no gain", "gain", "not compilable"],
)
def test_choose_xla_pays_for_the_shapes(inner, plain_s, xla_s, left_s, tried, taken):
    model, data = models.mlp(inner=inner()), TrainingData(*models.rows(16))
    model.chooses_xla = True
    set_steps(model, 1)
    traced, steps_seen = model.make_train_function() or model.train_function, []

    def expected_s(plan):
        steps_seen.append(plan.step_s)
        return xla_s if plan.jit_compile else plain_s

    before = dataclasses.replace(PLAN, step_s=(1.0, 0.0), duration_s=1.0)
    found = choose_xla(before, model, data, (4,), expected_s, shapes=7, left_s=left_s)
    assert found.jit_compile is taken
    assert found.duration_s > 1.0
    assert (found.compile_s or 0.0) > 0 if taken else found.compile_s is None
    assert [note.code for note in found.notes] == ["compiled_by_xla"] * taken
    assert is_compiled(model) is taken
    assert (model.train_function is traced) is not taken
    assert (found.step_s == before.step_s) is not taken
    if not tried:
        assert steps_seen == [before.step_s]


class Busy:
    """Updates of 1 ms and 0.02 ms for each row, on a machine that doubles the first times."""

    def __init__(self, slow, **seconds):
        self.slow, self.seconds = slow, {int(rows[1:]): s for rows, s in seconds.items()}

    def step_s(self, rows):
        factor, self.slow = 1 + (self.slow > 0), self.slow - 1
        self.seconds[rows] = min(factor * (0.001 + 2e-5 * rows), self.seconds.get(rows, 1.0))


def test_timed_line_has_a_slope_although_the_smallest_size_was_slowed():
    for slow, known, example_s in ((0, {}, 2e-5), (1, {}, 2e-5), (1, {"b1001": 0.021}, 1.9e-5)):
        fixed_s, slope_s = timed_line(Busy(slow, **known), [2, 32], compiled=False)
        assert slope_s == pytest.approx(example_s, rel=0.01)
        assert fixed_s == pytest.approx(0.001 if not known else 0.00204, rel=0.05)
    assert timed_line(Busy(9), [2], compiled=False)[1] == 0


def test_make_plan_compiles_only_sizes_that_train(tmp_path, monkeypatch):
    compiled, execute = set(), StepCall.execute

    def watched(step, batches, steps):
        compiled.add(int(installed_step(step._model).full_rows))
        execute(step, batches, steps)

    monkeypatch.setattr(StepCall, "execute", watched)
    build = functools.partial(models.linear, jit_compile=True)
    study = quick(tmp_path, build, (16, 32), objective="loss")
    assert study.plan.reason == "fits"
    assert compiled == {0, 32}  # 0: not compiled.


def test_search_compiles_as_planned_unless_the_model_decides(tmp_path):
    plant(tmp_path, jit_compile=True, micro_batch_size=None, reason="given")
    given = {"settings": {"micro_batch_size": None}, "objective": "loss"}
    by_plan = runs(quick(tmp_path, models.linear, (8,), **given))
    assert [run.jit_compile for run in by_plan] == [True]
    plant(tmp_path / "given", jit_compile=True, micro_batch_size=None, reason="given")
    build = functools.partial(models.linear, jit_compile=False)
    obeyed = runs(quick(tmp_path / "given", build, (8,), **given))
    assert [run.jit_compile for run in obeyed] == [False]


def stateful(hp):
    rows = layers.Input(batch_shape=(hp.get("batch_size"), 8))
    parts = [rows, layers.Reshape((4, 2)), layers.SimpleRNN(3, stateful=True)]
    return models.compiled(parts, "sgd", keras.losses.SparseCategoricalCrossentropy(True))


def known_rows(y, outputs):
    """Needs the batch size in the shape."""
    return keras.losses.sparse_categorical_crossentropy(tf.reshape(y, (outputs.shape[0],)), outputs)


def in_pairs(y, outputs):
    """Fails if the number of rows is not a multiple of 8."""
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs)
    return tf.reduce_mean(tf.reshape(losses, (-1, 8)), axis=1)


@pytest.mark.parametrize(
    ("build", "micro_batch_size"),
    [
        pytest.param(stateful, None, id="shape"),
        pytest.param(lambda: small(loss=known_rows), "auto", id="loss", marks=pytest.mark.slow),
        pytest.param(lambda: small(loss=in_pairs), "auto", id="pairs"),
    ],
)
def test_models_for_one_batch_size_have_whole_batches(tmp_path, build, micro_batch_size):
    settings = {"micro_batch_size": micro_batch_size, "steps_per_execution": "auto"}
    given = {"objective": "val_loss", "fit": {"validation_data": models.rows(32, seed=1)}}
    found = quick(tmp_path, build, (16,), settings=settings, kind=kbatch.BatchSizeTuner, **given)
    assert found.plan.reason == "whole"
    assert [run.failure for run in runs(found)] == [None]


def batches(batch_size):
    rows = tf.data.Dataset.from_tensor_slices(models.rows(40))
    return rows.batch(batch_size, drop_remainder=True)


def test_sequential_without_input_is_not_for_one_batch_size(tmp_path):
    """Keras builds it with the rows of its first batch, which do not bind it."""

    def build():
        return models.compiled([layers.Dense(1)], "sgd", "mse")

    given = {"settings": {"micro_batch_size": "auto", "dtype_policy": None}}
    study = quick(tmp_path, build, (8,), data=(batches,), objective="loss", **given)
    assert study.plan.reason == "fits"


def test_models_for_one_batch_size_name_sizes_that_do_not_divide(tmp_path):
    def failure(name, data):
        given = {"objective": "loss", "kind": kbatch.BatchSizeTuner, "data": data}
        (run,) = runs(quick(tmp_path / name, stateful, (16,), **given))
        return run.failure

    assert "takes only batches of 16 rows" in failure("arrays", models.rows(40))
    assert failure("advice", (batches,)) is None
