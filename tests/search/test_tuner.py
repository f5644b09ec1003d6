"""Searches with `BatchSizeTuner`: sizes, results, failures and interruptions."""

import gc
import inspect
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from batch_data import Rows
from keras_tuner.src.engine.trial import TrialStatus

import kbatch
from kbatch.errors import DeviceLostError
from kbatch.search.tuner_arguments import default_batch_sizes
from kbatch.training.build_function import as_hypermodel
from kbatch.training.data.training_data import TrainingData


def search(directory, hypermodel=None, **arguments):
    hypermodel = hypermodel or two_sizes()
    return searches.search(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def quick(directory, hypermodel, **arguments):
    return searches.quick(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def test_search_in_the_scope_of_a_strategy_is_refused_before_the_scope_ends(tmp_path):
    """Keras 3.15: `clear_session`, which keras-tuner calls, ends the scope without a word."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        with pytest.raises(ValueError, match="distribution_strategy=strategy"):
            quick(tmp_path, two_sizes())
        assert tf.distribute.has_strategy()


def two_sizes(build=models.stock, **arguments):
    return searches.stock(build, (8, 32), **arguments)


def test_the_two_constructors_have_at_most_26_arguments():
    doors = kbatch.BatchSizeTuner, kbatch.BatchSizeHyperModel
    assert sum(len(inspect.signature(door).parameters) for door in doors) <= 26


# Accuracies may be equal. Then the decision would depend on the time.
TWICE = {"executions_per_trial": 2, "objective": "val_loss"}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The tuner and the study of a search of two sizes."""
    tuner = search(tmp_path_factory.mktemp("grid"), **TWICE)
    return tuner, kbatch.load_study(tuner)


def test_grid_search_equals_keras_tuner_grid_search(grid, tmp_path):
    stock = searches.search(tmp_path, two_sizes(), **TWICE)
    tuner, study = grid
    of_stock = kbatch.load_study(stock)
    assert len(of_stock.runs_to_dataframe()) == 4
    for mine, theirs in zip(study.trials, of_stock.trials, strict=True):
        # keras-tuner's own tuners do not number the runs of a trial.
        assert [run.seed for run in theirs.executions] == [0, 1]
        assert (mine.trial_id, mine.metrics) == (theirs.trial_id, theirs.metrics)
        trials = [t.oracle.get_trial(mine.trial_id) for t in (tuner, stock)]
        assert trials[0].score == pytest.approx(trials[1].score)
        assert trials[0].best_step == trials[1].best_step
    best = [t.get_best_hyperparameters()[0].values for t in (tuner, stock)]
    assert best[0] == best[1]


def test_get_best_models_loads_best_epoch_of_best_trial(grid):
    tuner, study = grid
    (trial,), (model,) = tuner.oracle.get_best_trials(), tuner.get_best_models()
    result = model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True)
    (record,) = [t for t in study.trials if t.trial_id == trial.trial_id]
    assert result["loss"] == pytest.approx(min(record.metric_values("val_loss")))
    files = list(Path(tuner.project_dir).glob("**/*.h5"))
    assert {file.parent.name for file in files} == {f"trial_{trial.trial_id}"}
    with pytest.raises(RuntimeError, match="only of the recommended trial"):
        tuner.get_best_models(2)


def only_explored():
    """A build function that may be called once."""
    calls = []

    def build():
        calls.append(1)
        assert len(calls) == 1
        return models.stock()

    return build


def test_ended_search_trains_nothing(grid, capsys, monkeypatch):
    tuner, study = grid
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    gc.freeze()
    again = search(tuner.directory, two_sizes(only_explored()), **TWICE)
    assert gc.get_freeze_count() > 0  # The objects of the program stay frozen.
    assert again.remaining_trials == 0
    assert kbatch.load_study(again) == study
    assert capsys.readouterr().out == ""


class Fails(keras.callbacks.Callback):
    """Raises an error at the end of an epoch, in every run or in run number `at`."""

    def __init__(self, error, *, file=None, at=None):
        super().__init__()
        self.error, self.file, self.at = error, file, at

    def on_epoch_end(self, epoch, logs=None):
        if self.file is not None and epoch == 0:
            with self.file.open("a") as lines:
                lines.write("begun\n")
        if self.at is None or self.begun() == self.at:
            raise self.error

    def begun(self):
        return self.file.read_text().count("begun")


def test_search_continues_after_four_failed_trials(tmp_path, capsys):
    sizes = (4, 8, 16, 32)  # keras-tuner ends a search after three failed trials in a row.
    fit = {"callbacks": [Fails(MemoryError("18 GiB wanted"))]}
    failed = quick(tmp_path, searches.stock(batch_sizes=sizes), fit=fit | {"verbose": 1})
    assert capsys.readouterr().out.count("as before") == 3
    study = kbatch.load_study(failed)
    assert [trial.batch_size for trial in study.trials] == list(sizes)
    assert {trial.status for trial in study.trials} == {"out_of_memory"}
    assert {trial.failure for trial in study.trials} == {"MemoryError: 18 GiB wanted"}
    assert {trial.status for trial in failed.oracle.trials.values()} == {TrialStatus.FAILED}
    assert all("in on_epoch_end\n" in t.executions[-1].traceback for t in study.trials)
    message = r"no trial completed.*smaller batch sizes or .*batch size 4: .*18 GiB"
    for ask in (failed.get_best_hyperparameters, failed.get_best_models):
        with pytest.raises(RuntimeError, match=message):
            ask()
    again = quick(tmp_path, searches.stock(only_explored(), sizes), fit=fit)
    assert again.remaining_trials == 0


def test_record_of_failed_first_step_has_only_its_error(tmp_path):
    def fail(batch, logs):
        raise ValueError("no such label")

    fails = keras.callbacks.LambdaCallback(on_train_batch_begin=fail)
    study = quick(tmp_path, searches.stock(batch_sizes=(8,)), fit={"callbacks": [fails]}).study
    assert study.trials[0].failure == "ValueError: no such label"
    assert searches.noted(study) == set()


def test_restore_draws_seed_by_set_random_seed():
    def drawn(seed):
        keras.utils.set_random_seed(seed)
        hypermodel = kbatch.BatchSizeHyperModel(models.stock, (8, 16))
        hypermodel.restore(None)
        return hypermodel.seed

    assert drawn(5) == drawn(5) != drawn(6)


def test_search_records_failed_build_as_failed_trial(tmp_path):
    def build(hp):
        if hp.get("batch_size") == 16:
            raise RuntimeError("no such layer")
        return models.stock()

    tuner = quick(tmp_path, searches.stock(build, (8, 16)), executions_per_trial=2)
    study = kbatch.load_study(tuner)
    assert [trial.status for trial in study.trials] == ["completed", "failed"]
    (run,) = study.trials[1].executions
    assert run.failure == "RuntimeError: no such layer"
    assert "in build\n" in run.traceback
    assert (run.seed, run.batch_size, run.micro_batch_size) == (0, 16, None)
    assert (run.dtype_policy, run.optimizer, run.jit_compile) == ("float32", None, None)
    assert study.problems == ()
    assert "no such layer" in tuner.oracle.get_trial("0001").message


@pytest.mark.parametrize("rate", [1e30, 0.0])
def test_diverged_trial_has_status_failed(tmp_path, rate):
    def build(hp):
        diverges = hp.get("batch_size") == 8
        optimizer = keras.optimizers.SGD(rate if diverges else 0.01)
        model = models.mlp(optimizer=optimizer, loss=models.own_loss)
        if diverges and not rate:  # All outputs stay equal.
            model.set_weights([0 * weight for weight in model.get_weights()])
        return model

    # An epoch without validation shows a loss that is not finite.
    run, objective = (quick, "loss") if rate else (search, "val_loss")
    arguments = {"objective": objective, "executions_per_trial": 2}
    tuner = run(tmp_path, two_sizes(build, learning_rate_scaling=None), **arguments)
    statuses = [trial.status for trial in tuner.oracle.ended_trials]
    assert statuses == [TrialStatus.FAILED, TrialStatus.COMPLETED]
    diverged = kbatch.load_study(tuner).trials[0]
    assert len(diverged.executions) == 1
    assert diverged.outcome == "diverged" and not diverged.failure.startswith("diverged")


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("race", None), pytest.param("grid", "float32", marks=pytest.mark.slow)],
)
def test_search_ends_after_first_run_if_data_are_not_finite(tmp_path, strategy, policy, capsys):
    x, y = models.rows(94)
    x[3] = np.nan
    hypermodel = searches.stock(batch_sizes=(8, 16), dtype_policy=policy)
    kinds = {"kind": kbatch.BatchSizeTuner, "strategy": strategy, "data": (x, y)}
    study = searches.search(tmp_path, hypermodel, fit={"verbose": 1}, **kinds).study
    assert [len(trial.executions) for trial in study.trials] == [1]
    assert searches.noted(study) == {"data_not_finite"}
    said = capsys.readouterr().out
    assert said.count("The data are not finite: 1 of 94 rows") == 1
    assert "learning rate diverged" not in said and "ended the search" not in said


def brittle(y, outputs):
    """Is NaN if the weights have grown."""
    losses = keras.losses.sparse_categorical_crossentropy(y, outputs)
    return tf.where(tf.reduce_max(outputs) < 0.97, losses, np.nan)


@pytest.mark.slow  # A race climbs to the rates that diverge.
def test_search_seeks_no_other_cause_if_only_a_raised_learning_rate_diverges(tmp_path):
    def build():
        return models.mlp(optimizer=keras.optimizers.SGD(0.02), loss=brittle)

    def data(count, seed):
        x, _ = models.rows(count, seed=seed)
        return x, x[:, :3].argmax(1)

    race = {"kind": kbatch.BatchSizeTuner, "strategy": "race", "data": data(600, 0)}
    fit = {"validation_data": data(300, 1), "epochs": 3}
    study = searches.search(tmp_path, searches.stock(build, (8, 32)), fit=fit, **race).study
    diverged = [trial for trial in study.trials if trial.outcome == "diverged"]
    assert diverged and min(trial.learning_rate for trial in diverged) > 0.02
    assert not any(trial.notes for trial in diverged)


@pytest.mark.parametrize("at", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_interrupted_search_continues(grid, tmp_path, at):
    """The interruption comes in the first or second run of the second trial."""
    file = tmp_path / "begun"
    interrupts = Fails(KeyboardInterrupt(), file=file, at=at)
    with pytest.raises(KeyboardInterrupt, match="run the same script again") as interrupted:
        search(tmp_path, fit={"callbacks": [interrupts]}, **TWICE)
    assert "batch size 8 and learning rate" in str(interrupted.value)
    assert f"kbatch report {tmp_path / 'search'}" in str(interrupted.value)
    stopped = kbatch.load_study(tmp_path / "search")
    assert [trial.status for trial in stopped.trials] == ["completed", "interrupted"]
    file.write_text("")
    study = kbatch.load_study(search(tmp_path, fit={"callbacks": [interrupts]}, **TWICE))
    assert interrupts.begun() == 5 - at
    # The times of the interrupted run are kept.
    assert study.trials[1].executions[at - 3].spans[:-1] == stopped.trials[1].last.spans != ()
    for trial, undisturbed in zip(study.trials, grid[1].trials, strict=True):
        assert trial.metrics == undisturbed.metrics
        assert [run.seed for run in trial.executions] == [0, 1]


def test_lost_gpu_ends_search_and_trial_runs_again(tmp_path):
    lost, one = tf.errors.InternalError(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS"), (8,)
    with pytest.raises(DeviceLostError, match="last finished trial"):
        quick(tmp_path, searches.stock(batch_sizes=one), fit={"callbacks": [Fails(lost)]})
    (trial,) = kbatch.load_study(tmp_path / "search").trials
    assert trial.status == "failed"
    again = kbatch.load_study(quick(tmp_path, searches.stock(batch_sizes=one)))
    assert [trial.status for trial in again.trials] == ["completed"]


def test_several_objectives_are_summed_as_in_keras_tuner(tmp_path):
    others = ("loss", "min"), ("samples_per_second", "max")
    objective = ["accuracy", *(keras_tuner.Objective(*other) for other in others)]
    tuner = quick(tmp_path, two_sizes(), objective=objective, fit={"epochs": 2})
    best = kbatch.load_study(tuner).decide().best
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size


def test_validation_freq_judges_validated_epochs(tmp_path):
    fit = {"epochs": 5, "validation_freq": 2}
    hypermodel = searches.stock(batch_sizes=(32,))
    (trial,) = search(tmp_path, hypermodel, fit=fit, objective="val_loss").study.trials
    losses = {e.epoch: e.metrics.get("val_loss") for e in trial.executions[0].epochs}
    assert [epoch for epoch, loss in losses.items() if loss is not None] == [1, 3]
    assert trial.status == "completed"
    # The judged value is a mean of the validated epochs.
    assert min(losses[1], losses[3]) - 1e-6 <= trial.judged_value
    assert trial.judged_value <= max(losses[1], losses[3]) + 1e-6


def test_hyperparameter_declared_by_fit_joins_the_grid(tmp_path):
    class Late(keras_tuner.HyperModel):
        def build(self, hp):
            return models.stock()

        def fit(self, hp, model, *args, **kwargs):
            hp.Choice("patience", [1, 2])
            return model.fit(*args, **kwargs)

    study = kbatch.load_study(quick(tmp_path, searches.stock(Late(), (32,))))
    combinations = sorted((t.batch_size, t.hyperparameters["patience"]) for t in study.trials)
    assert combinations == [(32, 1), (32, 2)]


def test_tuner_without_batch_sizes_chooses_them_by_the_data(tmp_path):
    data = models.rows(400)
    settings = {"objective": "val_accuracy", "strategy": "grid", "directory": tmp_path}
    tuner, again, more = (
        kbatch.BatchSizeTuner(models.stock, **settings, executions_per_trial=n) for n in (1, 1, 2)
    )
    with pytest.raises(FileNotFoundError):
        _ = tuner.study
    with pytest.raises(RuntimeError, match="call `search` first"):
        tuner.get_best_hyperparameters()
    tuner.search(*data, validation_split=0.2, verbose=0)
    study = tuner.study
    # 320 training rows are ten batches of 32.
    assert [trial.batch_size for trial in study.trials] == [16, 32]
    assert study.search.settings["base_batch_size"] == 32
    assert study.search.settings["base_added"] is False
    assert [trial.executions[0].scaling.rule for trial in study.trials] == ["linear", "linear"]
    # A drawn seed is the same for all sizes.
    (seed,) = {trial.executions[0].seed for trial in study.trials}
    assert seed is not None and seed == study.search.settings["seed"]
    again.search(*data, validation_split=0.2, verbose=0)
    assert again.study == study == kbatch.load_study(Path(tuner.project_dir))
    assert again.get_best_hyperparameters()[0].get("batch_size") in (16, 32)
    more.search(*data, validation_split=0.2, verbose=0)
    assert more.study.search.settings["executions_asked"] == [1, 2]


def test_search_can_be_called_again_after_build_failed(tmp_path):
    fixed, data = [], models.rows(400)

    def build(hp):
        hp.Fixed("lr_decay", 0.9)  # This is not a learning rate.
        return models.stock() if fixed else None

    settings = {"strategy": "race", "max_trainings": 2, "directory": tmp_path}
    tuner = kbatch.BatchSizeTuner(build, "accuracy", **settings)
    with pytest.raises(ValueError, match="return model"):
        tuner.search(*models.rows(200), verbose=0)  # Only size 16 has eight batches.
    fixed.append(True)
    tuner.search(*data, verbose=0)
    study = tuner.study
    assert [trial.batch_size for trial in study.trials] == [16, 32]
    # The record and the factors of the rate are complete after the second call.
    assert "model" in study.search.facts
    assert all("learning_rate_factor" in trial.hyperparameters for trial in study.trials)


def test_refused_argument_with_overwrite_deletes_nothing(grid):
    folder = Path(grid[0].project_dir)
    place = {"directory": folder.parent, "project_name": folder.name, "overwrite": True}
    with pytest.raises(ValueError, match="tolerance=1"):
        kbatch.BatchSizeTuner(two_sizes(), "val_accuracy", tolerance=1, **place)
    assert kbatch.load_study(folder).trials == grid[1].trials


def zeros(count):
    return np.zeros((count, 8), "float32"), np.zeros(count, int)


ROWS = zeros(4000)
DATASET = tf.data.Dataset.from_tensor_slices(ROWS)


def of_size(size):
    return DATASET.batch(size)


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [(ROWS, 256), (zeros(10**6), 1024), ((DATASET,), 256), ((Rows(4000),), 256), ((of_size,), 256)],
)
def test_default_batch_sizes_have_eight_batches_per_epoch(arguments, largest):
    data = TrainingData(*arguments)
    sizes = default_batch_sizes(as_hypermodel(models.stock), data, parallel=False)
    assert sizes == kbatch.powers_of_two(16, largest)


@pytest.mark.parametrize(
    ("arguments", "parallel", "message"),
    [
        ((DATASET.repeat(),), False, "give `batch_sizes`"),
        ((of_size,), True, "give `batch_sizes`"),
        (zeros(127), False, "127 examples"),
    ],
)
def test_default_batch_sizes_need_data_of_known_length(arguments, parallel, message):
    with pytest.raises(ValueError, match=message):
        data = TrainingData(*arguments)
        default_batch_sizes(as_hypermodel(models.stock), data, parallel=parallel)
