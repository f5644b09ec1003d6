"""micro_batch_size="auto": found once for a model, and halved where memory runs out after all."""

import contextlib
import dataclasses
import json
import threading
import types
import weakref

import fake_nvml
import fake_tensorflow
import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from fake_tensorflow import FakeTensorFlow

import kbatch
from kbatch.device.control_group import ControlGroup
from kbatch.memory.record import MaxBatchSizeResult, ProbeRecord
from kbatch.records.usage import GpuProcess
from kbatch.search.auto_micro_batch import (
    MicroBatchCache,
    SearchMicroBatches,
    TrainingLeft,
    _times_name,
)
from kbatch.search.execution import FreshCallbacks
from kbatch.search.progress import FitReporter
from kbatch.search.trial_files import TrialFiles
from kbatch.search.trial_micro_batch import TrialMicroBatch
from kbatch.throughput.record import TrainingPoint, TrainingProfile
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import Samples, sample_of

layers = keras.layers
LIMIT = 100 * 10**6
FOLDER = "kbatch-micro-batches"


def search(directory, build=models.mlp, sizes=(8, 16, 32), *, settings=None, **arguments):
    chosen = {"micro_batch_size": "auto", "dtype_policy": "float32"} | (settings or {})
    if chosen["micro_batch_size"] == "auto":
        chosen = {"memory_limit_bytes": LIMIT} | chosen
    tuner = searches.search(directory, searches.hypermodel(build, sizes, **chosen), **arguments)
    return kbatch.load_study(tuner)


def files(directory):
    found = (directory / "search" / FOLDER).glob("*.json")
    others = ("-limit.json", "-parts.json", "-times.json")
    return sorted(f for f in found if not f.name.endswith(others))


def plant(source, directory, size, *, probe=(), **changed):
    """Makes a search in `directory` find that another one found `size`."""
    for file in files(source):
        content = json.loads(file.read_text())
        probes = [content["record"]["probes"][0] | {"batch_size": size} | dict(probe)]
        content["record"] |= {"max_batch_size": size, "probes": probes, **changed}
        target = directory / "search" / FOLDER / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content))


def same_results(study, other, trials=None):
    for mine, theirs in zip(study.trials[:trials], other.trials[:trials], strict=True):
        assert mine.hyperparameters == theirs.hyperparameters
        for name, value in theirs.metrics.items():
            if name != "samples_per_second":
                assert mine.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name


def runs(study):
    return [run for trial in study.trials for run in trial.executions]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def study(directory):
    """Trials of two sizes with a learning rate of each size."""
    return search(directory, sizes=(8, 32))


def test_a_model_is_probed_once_whatever_its_learning_rate(study, directory):
    first, later = runs(study)
    assert first.learning_rate != later.learning_rate
    assert first.micro_batch_search_s > 0
    assert later.micro_batch_search_s == 0.0
    (file,) = files(directory)
    found = kbatch.MaxBatchSizeResult.load(file)
    assert (found.max_batch_size, found.limit_bytes) == (32, LIMIT)
    # The largest fits, which ends the probing.
    (probe,) = found.probes
    assert probe.batch_size == 32
    assert 0 < probe.step_s < probe.duration_s


def test_sizes_are_not_timed_in_a_search_that_ends_sooner(study, directory):
    assert not list((directory / "search" / FOLDER).glob("*-times.json"))
    for run in runs(study)[1:]:
        assert "could not save what timing them takes" in run.notes[-2]


def test_what_fits_goes_through_whole_and_the_record_says_how_it_was_found(study):
    for run in runs(study):
        assert run.micro_batch_size == run.batch_size == run.batch_size_seen
        assert run.status == "completed"
        (note,) = [note for note in run.notes if "fit at once" in note]
        assert "32 examples" in note
    assert "found in" in runs(study)[0].notes[-1]
    assert "from an earlier search" in runs(study)[1].notes[-1]
    assert searches.noted_columns(study) == {"micro-batch size": "micro_batch_size"}
    # The end of memory was not met.
    assert {run.most_in_memory for run in runs(study)} == {None}


def test_probing_changes_no_result(study, tmp_path):
    same_results(study, search(tmp_path, sizes=(8, 32), settings={"micro_batch_size": 32}))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What a search with a micro-batch of 4 gives."""
    return search(tmp_path_factory.mktemp("given"), sizes=(32,), settings={"micro_batch_size": 4})


def test_a_search_that_goes_on_later_reads_the_file(study, directory, tmp_path, given):
    plant(directory, tmp_path, 4)
    later = search(tmp_path, sizes=(32,))
    assert [run.micro_batch_size for run in runs(later)] == [4]
    assert [run.micro_batch_search_s for run in runs(later)] == [0.0]
    same_results(later, given)


def test_the_fastest_size_is_trained_with(study, directory, tmp_path):
    """Another search found 16 examples at once to be the fastest part of 32."""
    plant(directory, tmp_path, 32)
    rounds = tuple(range(9))
    points = tuple(
        TrainingPoint(
            micro_batch_size=size,
            batch_size=32,
            outcome="measured",
            rounds=rounds,
            step_times_s=tuple(seconds + 1e-5 * number for number in rounds),
        )
        for size, seconds in ((16, 1e-3), (32, 2e-3))
    )
    profile = TrainingProfile("mlp", "float32", False, points, duration_s=1.0)
    (file,) = files(directory)
    profile.save(tmp_path / "search" / FOLDER / f"{_times_name(file.stem, 32)}.json")
    (run,) = runs(later := search(tmp_path, sizes=(32,)))
    assert (run.micro_batch_size, run.micro_batch_search_s) == (16, 0.0)
    assert any("train 1.96" in note for note in run.notes)
    assert searches.noted_columns(later) == {"micro-batch size": "micro_batch_size"}
    same_results(later, search(tmp_path / "given", sizes=(32,), settings={"micro_batch_size": 16}))


def test_micro_batches_are_equal_parts(study, directory, tmp_path):
    slow = {"stopped_after": 2, "step_s": 12.4}
    plant(directory, tmp_path, 12, probe=slow, in_window=True)
    (run,) = runs(search(tmp_path, sizes=(32,)))
    assert (run.micro_batch_size, run.most_in_memory) == (11, 12)
    assert "Steps of 12 examples take 12.4 s: memory was read from 2 of them" in run.notes[-1]


class Held:
    """What a step that runs out holds; its references are in `HELD`."""


HELD = []


def run_out(*_, **__):
    held = Held()
    HELD.append(weakref.ref(held))
    raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")


class RunsOut(keras.callbacks.Callback):
    """Lets a step run out of memory, as often as it has lives."""

    def __init__(self, file, step=2, lives=1):
        super().__init__()
        self.file, self.step, self.lives = file, step, lives

    def on_train_batch_begin(self, batch, logs=None):
        before = len(self.file.read_text()) if self.file.exists() else 0
        if batch == self.step and before < self.lives:
            self.file.write_text("x" * (before + 1))
            self.model.optimizer.learning_rate = 7.0  # As a schedule by callback would.
            self.model.train_function = run_out


def with_dropout():
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


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


@pytest.mark.filterwarnings("ignore:Not equal to the whole batch")
def test_late_want_of_memory_starts_the_trial_and_its_callbacks_again_with_half(
    monkeypatch, tmp_path
):
    shrink, alive = TrialMicroBatch.shrink, []

    def watched(micro_batch):
        alive.append(HELD[-1]() is not None)
        shrink(micro_batch)

    monkeypatch.setattr(TrialMicroBatch, "shrink", watched)
    fit = {"callbacks": [Counts(tmp_path / "counts"), RunsOut(tmp_path / "lives")]}
    # The scale of the loss is put back too.
    settings = {"dtype_policy": "mixed_float16"}
    tuner = {"kind": kbatch.BatchSizeTuner, "fit": fit}
    study = search(
        tmp_path / "auto", models.Locked(with_dropout), (16, 32), settings=settings, **tuner
    )
    assert list(tmp_path.glob("**/*.h5"))
    run, later = runs(study)
    assert (run.status, run.batch_size, run.batch_size_seen) == ("completed", 16, 16)
    assert (run.micro_batch_size, run.most_in_memory) == (8, 8)
    assert searches.noted_columns(study)["micro-batch size"] == "micro_batch_size"
    (note,) = [note for note in run.notes if "ran out in training" in note]
    assert ["of 16:" in note, "of 8." in note] == [True, True]
    assert run.examples_seen == 2 * 94
    assert len(run.epochs) == 2
    assert (tmp_path / "counts").read_text() == "12 [0, 1]\n6 [0, 1]\n"
    # Nothing of the step that ran out is left when the model is put back.
    assert alive == [False]
    # A size that ran out is not tried by later trials.
    assert later.micro_batch_size == 8
    assert any("ran out of memory in training" in note for note in later.notes)
    settings["micro_batch_size"] = 8
    same_results(study, search(tmp_path / "given", with_dropout, (16, 32), settings=settings))


def test_where_one_example_runs_out_in_training_the_trial_ends(tmp_path):
    fit = {"callbacks": [RunsOut(tmp_path / "lives", step=0, lives=99)]}
    study = search(tmp_path / "auto", models.Locked(), (2,), fit=fit)
    (run,) = runs(study)
    assert (run.status, run.micro_batch_size) == ("out_of_memory", 1)
    assert (tmp_path / "lives").read_text() == "xx"


def test_fresh_callbacks_are_shared_by_the_fits_of_an_attempt(tmp_path):
    class Locking(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    mine, locking, model = Counts(tmp_path), Locking(), models.mlp()
    mine.other = model
    search_own = FitReporter(print, execution=0, executions=1)
    given = [mine, locking, search_own]
    fresh = FreshCallbacks()
    assert fresh.of(given, model) == given
    mine.batches = 5
    for _ in range(2):
        fresh.start_again()
        again, *rest = fresh.of(given, model)
        assert (again.batches, again.other) == (0, model)
        assert again is not mine
        assert rest == [locking, search_own]
        again.batches = 3
        assert fresh.of(given, model)[0] is again


class RunsOutItself(keras.callbacks.Callback):
    def __init__(self, moment):
        super().__init__()
        setattr(self, moment, run_out)


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_test_begin"])
@pytest.mark.slow
def test_what_runs_out_outside_the_train_step_leaves_the_size_as_it_is(tmp_path, moment):
    fit = {"callbacks": [RunsOutItself(moment)]}
    study = search(tmp_path, models.Locked(), (16,), fit=fit)
    (run,) = runs(study)
    assert (run.status, run.micro_batch_size) == ("out_of_memory", 16)
    assert not list((tmp_path / "search" / FOLDER).glob("*-limit.json"))


def auto(**arguments):
    defaults = {"largest_batch_size": 64, "memory_limit_bytes": None}
    return SearchMicroBatches(**(defaults | arguments))


def halving(directory, optimizer="adam"):
    """The sizes of a model in another process."""
    model, source = models.mlp(optimizer=optimizer), sample_of(FitData(*models.rows(8)))
    return MicroBatchCache(auto(), model, models.mlp, source, directory)


def test_of_the_sizes_that_ran_out_in_several_processes_the_least_counts(tmp_path):
    first, second = halving(tmp_path), halving(tmp_path)
    assert second.halve(64) == 32
    assert first.halve(32) == 16
    assert second.halve(64) == 16  # Never back to 32.
    assert halving(tmp_path).halve(64) == 16
    assert second.halve(16) == 8
    assert halving(tmp_path, "sgd").halve(64) == 32


def test_memory_that_ran_out_beside_another_process_is_not_remembered_by_later_searches(
    monkeypatch, tmp_path
):
    beside = (GpuProcess(4711, None),)
    monkeypatch.setattr("kbatch.search.auto_micro_batch.other_processes", lambda: beside)
    first = halving(tmp_path)
    assert [first.halve(64), first.halve(32)] == [32, 16]
    assert halving(tmp_path).halve(64) == 32


HOSTS = {
    "workers_on_device": lambda: 2,
    "read_control_group": lambda: ControlGroup(10**9, 10**9),
    "psutil.virtual_memory": lambda: types.SimpleNamespace(total=10**9),
}


def keys(model, *searches):
    """The keys of a model in these searches."""
    source = sample_of(FitData(*models.rows(8)))
    given = (model, models.mlp, source)
    return [MicroBatchCache(search, *given, None).key for search in searches]


@pytest.mark.parametrize("name", HOSTS)
def test_a_size_that_another_share_of_memory_gave_is_not_used(monkeypatch, name):
    both = models.mlp(), auto(), auto(memory_limit_bytes=LIMIT)
    before = keys(*both)
    assert keys(*both) == before
    monkeypatch.setattr(f"kbatch.search.auto_micro_batch.{name}", HOSTS[name])
    free, bound = keys(*both)
    # Where a person gave the limit, that is it on any host.
    assert free != before[0]
    assert bound == before[1]


class TwoFits(keras_tuner.HyperModel):
    """Trains in two parts, the second one with frozen layers."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()

    def build(self, hp):
        hp.Choice("units", [4, 8])
        model = models.mlp()
        if hp.get("units") == 4:
            model = keras.Sequential([layers.Input((8,)), layers.Dense(3, "softmax")])
            model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def fit(self, hp, model, x, y, **kwargs):
        model.fit(x[:40], y[:40], **kwargs)
        return model.fit(x, y, **kwargs)


@pytest.mark.slow
def test_two_fits_in_a_trial_have_one_size_and_start_again_together(tmp_path):
    # Its second fit only has a fifth step.
    fit = {"callbacks": [RunsOut(tmp_path / "lives", step=4)]}
    sizes = (16,)
    study = search(tmp_path / "auto", TwoFits(), sizes, fit=fit)
    assert [run.micro_batch_size for run in runs(study)] == [8, 16]
    assert len(files(tmp_path / "auto")) == 2
    assert all(run.micro_batch_search_s > 0 for run in runs(study))
    assert runs(study)[0].examples_seen == 2 * 40 + 2 * 94
    given = search(tmp_path / "given", TwoFits(), sizes, settings={"micro_batch_size": 8})
    same_results(study, given, trials=1)


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3, activation="softmax", dtype="float32")

        def call(self, x):
            return self.dense(x)

    model = Subclassed()
    model.compile("sgd", models.own_loss, metrics=["accuracy"])
    return model


def as_dataset():
    return (tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(10),)


def as_function():
    return (lambda size: tf.data.Dataset.from_tensor_slices(models.rows(94)).batch(size),)


SLOWLY = {
    "arrays": (None, {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "function": (as_function(), {}),
    "split": (None, {"validation_split": 0.2, "validation_data": None}),
}
# Rows of arrays are taken in most tests of this file.
DATA = {"dataset": (as_dataset(), {})} | {
    name: pytest.param(form, marks=pytest.mark.slow) for name, form in SLOWLY.items()
}


@pytest.mark.parametrize("form", DATA.values(), ids=DATA)
def test_every_form_of_data_gives_what_the_same_size_given_gives(tmp_path, form):
    data, fit = form
    sizes, arguments = (16,), {"data": data, "fit": fit}
    study = search(tmp_path / "auto", models.Locked(subclassed), sizes, **arguments)
    (run,) = runs(study)
    assert (run.status, run.micro_batch_size) == ("completed", 16)
    given = search(
        tmp_path / "given",
        subclassed,
        sizes,
        settings={"micro_batch_size": 16},
        **arguments,
    )
    same_results(study, given)


TUNERS = {
    "hyperband": (keras_tuner.Hyperband, {"max_epochs": 4}),
    "random": (keras_tuner.RandomSearch, {"max_trials": 2, "executions_per_trial": 2}),
}


@pytest.mark.parametrize("kind", TUNERS.values(), ids=TUNERS)
@pytest.mark.slow
def test_trials_that_go_on_and_further_executions_do_not_probe_again(tmp_path, kind):
    tuner, arguments = kind
    study = search(tmp_path, models.Locked(), (8, 32), kind=tuner, **arguments)
    searched = [run.micro_batch_search_s for run in runs(study)]
    assert len(searched) >= 2
    assert sum(seconds > 0 for seconds in searched) == 1
    kept = [path.name for path in (tmp_path / "search" / FOLDER).iterdir()]
    assert len(files(tmp_path)) == 1
    assert [name.endswith("-parts.json") for name in kept].count(True) == len(kept) - 1 == 1
    assert {run.status for run in runs(study)} == {"completed"}


BUDGETS = {
    "epochs": ({}, 94 * 3 * 5, None),
    "later epochs": ({"initial_epoch": 1}, 94 * 2 * 5, None),
    "steps": ({"steps_per_epoch": 2}, 2 * 32 * 3 * 5, None),
    "time": ({"callbacks": [kbatch.TimeBudget(4)]}, 94 * 3 * 5, 4.0 * 5),
    "updates": ({"callbacks": [kbatch.UpdateBudget(2)]}, 2 * 32 * 5, None),
}


def left_to(**left):
    settings = {"size": None, "directory": None}
    return TrialMicroBatch(auto(), models.mlp(), models.mlp, batch_size=32, **(settings | left))


@pytest.mark.parametrize("given", BUDGETS)
def test_the_training_that_is_left_is_that_of_all_trials_to_come(given):
    call, examples, train_s = BUDGETS[given]
    trial = left_to(trainings_left=5)
    left = trial._left(sample_of(FitData(*models.rows(94))), {"epochs": 3} | call)
    assert left == TrainingLeft(examples, train_s)
    assert left.seconds(0.5) == min(examples * 0.5, train_s or np.inf)


def test_trainings_count_where_fewer_examples_at_once_may_be_faster():
    def left(sizes, remaining, executions=1):
        oracle = types.SimpleNamespace(
            objective=keras_tuner.Objective("loss", "min"), remaining_trials=lambda: remaining
        )
        tuner = types.SimpleNamespace(
            project_dir="here",
            oracle=oracle,
            executions_per_trial=executions,
            get_trial_dir=lambda trial_id: trial_id,
        )
        files = TrialFiles(tuner, types.SimpleNamespace(trial_id="0000"))
        return files.trainings_left(sizes)

    sizes = (16, 32, 64, 128, 256, 512, 1024)
    assert left(sizes, None) == pytest.approx(1.0)
    assert left(sizes, 70, executions=3) == pytest.approx(30.0)
    assert left((64,), 5) == 5.0
    assert left((600, 800, 1000), 3) == 3.0
    assert left(sizes, 0) == pytest.approx(1 / 7)


def test_what_a_data_function_holds_is_not_known():
    trial = left_to()
    assert trial._left(as_function()[0], {"epochs": 3}).seconds(1.0) is None


def test_the_rows_of_a_dataset_are_read_once_for_all_executions():
    read = []

    def rows():
        read.append(None)
        yield from zip(*models.rows(20), strict=True)

    signature = (tf.TensorSpec((8,)), tf.TensorSpec((), tf.int64))
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature).batch(10)
    data = Samples()
    found = [data.source(FitData(dataset), models.mlp()) for _ in range(3)]
    assert len(read) == 1
    assert found[0] is found[2]
    assert found[0].rows[0].shape == (10, 8)


def wide():
    model = keras.Sequential([layers.Input((8,)), layers.Dense(300_000), layers.Dense(3)])
    model.compile("adam", "mse")
    return model


def wide_data():
    x, _ = models.rows(8)
    return x, np.zeros((8, 3), "float32")


WIDE = {"objective": keras_tuner.Objective("loss", "min"), "fit": {"validation_data": None}}


def told(directory):
    """What keras-tuner knows of the only trial."""
    (file,) = (directory / "search").glob("trial_*/trial.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_one_example_that_does_not_fit_fails_the_trial_with_the_bytes(tmp_path):
    # Weights and slots take 43 MB, gradients as much as the weights.
    settings = {"memory_limit_bytes": 52 * 2**20}
    study = search(tmp_path, wide, (4,), data=wide_data(), settings=settings, **WIDE)
    (trial,) = study.trials
    assert trial.status == "out_of_memory"
    assert "One example does not fit" in trial.executions[0].failure
    assert "52.0 MiB" in trial.executions[0].failure
    assert "52.0 MiB" in told(tmp_path)["message"]


def test_a_limit_below_the_weights_fails_the_trial(tmp_path):
    """Another trial of the search may have a smaller model."""
    settings = {"memory_limit_bytes": 20 * 2**20}
    study = search(tmp_path, models.Locked(wide), (4,), data=wide_data(), settings=settings, **WIDE)
    (run,) = runs(study)
    assert run.status == "out_of_memory"
    assert "a limit of 20.0 MiB, weights of 41.2 MiB" in run.failure
    assert told(tmp_path)["status"] == "FAILED"
    assert "max_consecutive_failed_trials" in told(tmp_path)["message"]
    assert "weights of 41.2 MiB" in told(tmp_path)["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_limit_bytes": 5}, "memory_limit_bytes=5"),
        ({"micro_batch_size": "most"}, "micro_batch_size='most'"),
    ],
)
def test_settings_that_are_none_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        searches.hypermodel(**settings)


def key_here(monkeypatch, model, **gpu):
    """The key of a model on a host with such a GPU."""
    limit = gpu.pop("memory_limit", 15 * 2**30)
    fake_nvml.install(monkeypatch, FakeNvml(FakeGpu(**gpu)))
    fake_tensorflow.install(monkeypatch, FakeTensorFlow("0000:01:00.0", memory_limit=limit))
    return keys(model, auto())[0]


def test_a_size_that_another_gpu_limit_or_driver_gave_is_not_used(monkeypatch):
    model = models.mlp()
    before = key_here(monkeypatch, model)
    # What a driver leaves free differs by some MiB from start to start.
    assert key_here(monkeypatch, model, memory_limit=15 * 2**30 + 2**22) == before
    assert key_here(monkeypatch, model, memory_limit=12 * 2**30) != before
    # What fits does not depend on the power: times under another cap are not used.
    assert key_here(monkeypatch, model, power_cap_mw=300_000) == before
    monkeypatch.setattr(FakeNvml, "driver", b"570.1")
    assert key_here(monkeypatch, model) != before


def test_what_was_found_beside_another_process_is_not_kept_and_says_so(monkeypatch, tmp_path):
    probed = MaxBatchSizeResult(
        8,
        "the most there is",
        True,
        LIMIT,
        (0.8, 0.9),
        True,
        "GPU:0",
        "float32",
        100,
        probes=(ProbeRecord(8, 90 * 10**6, "fits", 0.1),),
        other_processes=(GpuProcess(4711, 2**30),),
    )
    module = "kbatch.search.auto_micro_batch"
    monkeypatch.setattr(f"{module}.open_probes", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(f"{module}.probe_max_batch", lambda *arguments, **keywords: probed)
    model, source = models.mlp(), sample_of(FitData(*models.rows(94)))

    def found(search):
        cache = MicroBatchCache(search, model, models.mlp, source, tmp_path)
        return cache.fastest(8), tmp_path / FOLDER / f"{cache.key}.json"

    here = auto(largest_batch_size=8, memory_limit_bytes=LIMIT)
    first, file = found(here)
    text = "process 4711 1.00 GiB. So it is not kept for later searches."
    assert text in first.notes[1]
    assert text in found(here)[0].notes[1]  # In this search it is.
    assert not file.exists()
    probed = dataclasses.replace(probed, other_processes=())
    free, file = found(auto(largest_batch_size=8, memory_limit_bytes=LIMIT))
    assert "later searches" not in free.notes[1]
    assert MaxBatchSizeResult.load(file) == probed
    file.write_text(file.read_text()[:100])  # What is damaged is measured again.
    again, _ = found(auto(largest_batch_size=8, memory_limit_bytes=LIMIT))
    assert again.search_s > 0
    assert MaxBatchSizeResult.load(file) == probed


@pytest.mark.slow
def test_under_xla_a_size_is_found_and_trained_with(tmp_path):
    def build():
        return models.mlp(jit_compile=True)

    first, second = runs(search(tmp_path, build, (16, 64)))
    assert first.jit_compile
    assert second.jit_compile
    assert (first.status, second.status) == ("completed", "completed")
    assert (first.batch_size_seen, second.batch_size_seen) == (16, 64)
    # The largest batch was probed, and fits: nothing more is known of memory, nothing is cut.
    assert (second.most_in_memory, second.micro_batch_size) == (None, 64)
