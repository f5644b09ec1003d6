"""A search with `BatchSizeTuner`: its results, its failures, how it goes on."""

from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from keras_tuner.src.engine.trial import TrialStatus

import kbatch
from kbatch.errors import DeviceLostError
from kbatch.search.trial_files import CHECKPOINT_NAME
from kbatch.search.validation_outcomes import BestEpoch
from kbatch.study.trial import Objective


def search(directory, hypermodel=None, **arguments):
    hypermodel = hypermodel or two_sizes()
    return searches.search(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def quick(directory, hypermodel, **arguments):
    return searches.quick(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def two_sizes(build=models.stock, **arguments):
    return searches.stock(build, (8, 32), **arguments)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A search of two sizes, with its study."""
    # Not by accuracy, which may be equal: then the fastest is named.
    folder = tmp_path_factory.mktemp("found")
    tuner = search(folder, executions_per_trial=2, objective="val_loss")
    return tuner, kbatch.load_study(tuner)


def test_it_finds_what_keras_tuners_grid_search_finds(found, tmp_path):
    stock = searches.search(tmp_path, two_sizes(), executions_per_trial=2, objective="val_loss")
    tuner, study = found
    of_stock = kbatch.load_study(stock)
    assert len(of_stock.to_dataframe(executions=True)) == 4
    for mine, theirs in zip(study.trials, of_stock.trials, strict=True):
        # keras-tuner's own tuners do not say which execution of a trial comes.
        assert [run.seed for run in theirs.executions] == [0, 1]
        assert (mine.trial_id, mine.metrics) == (theirs.trial_id, theirs.metrics)
        trials = [t.oracle.get_trial(mine.trial_id) for t in (tuner, stock)]
        assert trials[0].score == pytest.approx(trials[1].score)
        assert trials[0].best_step == trials[1].best_step
    best = [t.get_best_hyperparameters()[0].values for t in (tuner, stock)]
    assert best[0] == best[1]


def test_the_best_models_have_the_weights_of_their_best_execution(found):
    tuner, study = found
    (trial,), (model,) = tuner.oracle.get_best_trials(), tuner.get_best_models()
    result = model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True)
    (record,) = [t for t in study.trials if t.trial_id == trial.trial_id]
    assert result["loss"] == pytest.approx(min(record.metric_values("val_loss")))


def test_only_the_best_trials_keep_a_checkpoint(found):
    tuner, _ = found
    kept = {f"trial_{trial.trial_id}" for trial in tuner.oracle.get_best_trials(1)}
    files = list(Path(tuner.project_dir).glob("**/*.h5"))
    assert {file.parent.name for file in files} == kept
    with pytest.raises(RuntimeError, match="no checkpoint: the decided and the best"):
        tuner.get_best_models(2)


def test_a_search_that_ended_runs_nothing_again(found, capsys):
    tuner, study = found
    hypermodel = two_sizes(only_explored())
    again = search(tuner.directory, hypermodel, executions_per_trial=2, objective="val_loss")
    assert again.remaining_trials == 0
    assert kbatch.load_study(again) == study
    assert capsys.readouterr().out == ""


def test_another_objective_in_the_same_directory_is_refused(found):
    tuner, _ = found
    arguments = {"executions_per_trial": 2, "objective": "val_accuracy"}
    with pytest.raises(ValueError, match=r"another objective.*'val_accuracy'.*'val_loss'"):
        search(tuner.directory, **arguments)


def test_what_the_tuner_overrides_is_called_by_keras_tuner():
    """These names are keras-tuner's own: renamed there, its own failure handling would return."""
    for name in ("_populate_initial_space", "_try_run_and_update_trial", "_build_and_fit_model"):
        assert callable(getattr(keras_tuner.Tuner, name))
    for name in ("_save_trial", "create_trial", "end_trial"):
        assert callable(getattr(keras_tuner.Oracle, name))


def only_explored():
    """A build function that may be called once."""
    calls = []

    def build():
        calls.append(1)
        assert len(calls) == 1
        return models.stock()

    return build


class Fails(keras.callbacks.Callback):
    """Raises at the end of the first epoch, in trials or executions that it counts."""

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


SIZES = (4, 8, 16, 32)  # keras-tuner gives up after three in a row.


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A search in which four trials in a row run out of memory."""
    directory = tmp_path_factory.mktemp("failed")
    return quick(directory, searches.stock(batch_sizes=SIZES), fit=failing())


def failing():
    return {"callbacks": [Fails(MemoryError("18 GiB wanted"))]}


def test_however_many_fail_in_a_row_the_search_goes_on(failed):
    study = kbatch.load_study(failed)
    assert [trial.batch_size for trial in study.trials] == list(SIZES)
    assert {trial.status for trial in study.trials} == {"out_of_memory"}
    assert {trial.failure for trial in study.trials} == {"MemoryError: 18 GiB wanted"}
    assert {trial.status for trial in failed.oracle.trials.values()} == {TrialStatus.FAILED}
    assert all("in on_epoch_end\n" in t.executions[-1].traceback for t in study.trials)


def test_where_nothing_completed_asking_for_the_best_raises_with_the_causes(failed):
    message = r"none of 4 trials completed.*smaller `micro_batch_size`.*batch size 4: .*18 GiB"
    for ask in (failed.get_best_hyperparameters, failed.get_best_models):
        with pytest.raises(RuntimeError, match=message):
            ask()


def test_a_project_of_failures_is_not_poisoned(failed):
    hypermodel = searches.stock(only_explored(), SIZES)
    assert quick(failed.directory, hypermodel, fit=failing()).remaining_trials == 0


def test_a_build_that_fails_is_a_trial_that_failed(tmp_path):
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
    kbatch.write_report(study, tmp_path / "report.html")
    kbatch.plot_trials(study)


def test_a_trial_that_diverges_has_failed_for_keras_tuner_too(tmp_path):
    def build(hp):
        rate = 1e30 if hp.get("batch_size") == 8 else 0.01
        return models.stock(optimizer=keras.optimizers.SGD(rate))

    hypermodel = two_sizes(build, learning_rate_scaling=None)
    tuner = search(tmp_path, hypermodel, objective="val_loss", executions_per_trial=2)
    statuses = [trial.status for trial in tuner.oracle.ended_trials]
    assert statuses == [TrialStatus.FAILED, TrialStatus.COMPLETED]
    diverged = kbatch.load_study(tuner).trials[0]
    assert len(diverged.executions) == 1
    assert diverged.failure.startswith("diverged")


def test_an_interrupted_search_says_how_to_go_on_and_does(found, tmp_path):
    """In the second execution of the second trial: three have completed then."""
    file = tmp_path / "begun"
    interrupts = Fails(KeyboardInterrupt(), file=file, at=4)
    arguments = {"executions_per_trial": 2, "objective": "val_loss"}
    with pytest.raises(KeyboardInterrupt, match="run the same script again"):
        search(tmp_path, fit={"callbacks": [interrupts]}, **arguments)
    stopped = kbatch.load_study(tmp_path / "search")
    assert [trial.status for trial in stopped.trials] == ["completed", "interrupted"]
    file.write_text("")
    study = kbatch.load_study(search(tmp_path, fit={"callbacks": [interrupts]}, **arguments))
    assert interrupts.begun() == 1
    for trial, undisturbed in zip(study.trials, found[1].trials, strict=True):
        assert trial.metrics == undisturbed.metrics
        assert [run.seed for run in trial.executions] == [0, 1]


def test_a_mistake_in_what_was_given_ends_the_search_and_is_no_result(tmp_path):
    fit = {"validation_data": None}
    with pytest.raises(keras_tuner.errors.FatalError, match="val_accuracy"):
        search(tmp_path, fit=fit)
    assert not list(tmp_path.glob("search/trial_0001"))
    again = search(tmp_path, fit={"epochs": 1})
    assert len(kbatch.load_study(again).trials) == 2


def test_a_lost_gpu_ends_the_search_whose_trial_runs_again_later(tmp_path):
    lost, one = tf.errors.InternalError(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS"), (8,)
    with pytest.raises(DeviceLostError, match="from its last finished trial"):
        quick(tmp_path, searches.stock(batch_sizes=one), fit={"callbacks": [Fails(lost)]})
    (trial,) = kbatch.load_study(tmp_path / "search").trials
    assert trial.status == "failed"
    again = kbatch.load_study(quick(tmp_path, searches.stock(batch_sizes=one)))
    assert [trial.status for trial in again.trials] == ["completed"]


class Watches(keras.callbacks.Callback):
    """Looks for checkpoints during training."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        assert not list(self.folder.glob("**/*.h5"))


class OwnObjective(keras_tuner.HyperModel):
    """Computes the objective after training."""

    def build(self, hp):
        return models.stock()

    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        return {"mine": float(hp.get("batch_size"))}


def test_training_writes_no_checkpoint_an_epoch(tmp_path):
    fit, objective = {"callbacks": [Watches(tmp_path)]}, keras_tuner.Objective("mine", "max")
    tuner = search(tmp_path, searches.stock(OwnObjective(), (8,)), objective=objective, fit=fit)
    assert kbatch.load_study(tuner).trials[0].failure is None
    assert len(list(tmp_path.glob("**/*.h5"))) == 1
    assert len(tuner.get_best_models()) == 1


def test_a_checkpoint_leaves_the_model_with_its_last_weights(tmp_path):
    ended = []

    class Own(OwnObjective):
        def fit(self, hp, model, *args, **kwargs):
            history = model.fit(*args, **kwargs)
            ended.append(model.evaluate(*models.rows(40, seed=1), verbose=0, return_dict=True))
            return history

    hypermodel = searches.stock(Own(), (8,))
    study = kbatch.load_study(search(tmp_path, hypermodel, fit={"epochs": 4}))
    last = study.trials[0].executions[0].epochs[-1]
    assert ended[0]["loss"] == pytest.approx(last.metrics["val_loss"], rel=1e-5)


ACCURACY, LOSS = Objective("val_accuracy", "max"), Objective("val_loss", "min")
ACCURACIES = [{"val_accuracy": value} for value in (0.3, 0.5, 0.4, float("nan"))]
LATE = [{"val_loss": 0.1}, {"val_loss": 0.2, "f1": 0.7}, {"val_loss": 0.3, "f1": 0.6}]
# The best accuracy, the best loss, the least sum (-1.2), and the last epoch.
BOTH = [
    {"val_accuracy": accuracy, "val_loss": loss}
    for accuracy, loss in ((0.9, 0.5), (0.2, -0.6), (0.8, -0.4), (0.5, -0.5))
]
SUM = (Objective("multi_objective", "min"), (ACCURACY, LOSS))


@pytest.mark.parametrize(
    ("objective", "epochs", "before", "kept"),
    [
        ((ACCURACY,), ACCURACIES, 0.4, 1.0),
        ((ACCURACY,), ACCURACIES, 0.5, None),
        # The last one, where the objective is known only after training.
        ((Objective("mine", "max"),), ACCURACIES, 0.4, 3.0),
        ((Objective("f1", "max"),), LATE, None, 1.0),
        (SUM, BOTH, -1.1, 2.0),
        (SUM, BOTH, -1.3, None),
    ],
)
def test_a_checkpoint_is_the_best_epoch_of_all_executions(
    tmp_path, objective, epochs, before, kept
):
    assert checkpoint_of(BestEpoch(*objective), epochs, tmp_path, before) == kept


def checkpoint_of(best, epochs, folder, before):
    """The epoch whose weights are written, None where none are."""
    model = models.mlp()
    best.set_model(model)
    for epoch, logs in enumerate(epochs):
        for variable in model.trainable_variables:
            variable.assign(keras.ops.full(variable.shape, float(epoch)))
        best.on_epoch_end(epoch, logs)
    best.write_weights(model, folder, before)
    last = float(len(epochs) - 1)
    assert all(np.all(w == last) for w in model.get_weights())
    if not (folder / CHECKPOINT_NAME).exists():
        return None
    model.load_weights(folder / CHECKPOINT_NAME)
    (kept,) = {float(value) for w in model.get_weights() for value in w.ravel()}
    return kept


def test_several_objectives_are_weighed_as_keras_tuner_does(tmp_path):
    objective = ["val_accuracy", keras_tuner.Objective("val_loss", "min")]
    tuner = search(tmp_path, objective=objective)
    best = kbatch.load_study(tuner).best_trial()
    assert tuner.get_best_hyperparameters()[0].get("batch_size") == best.batch_size


def test_a_hyperparameter_that_training_declares_becomes_part_of_the_grid(tmp_path):
    class Late(OwnObjective):
        def fit(self, hp, model, *args, **kwargs):
            hp.Choice("patience", [1, 2])
            return model.fit(*args, **kwargs)

    study = kbatch.load_study(quick(tmp_path, searches.stock(Late(), (32,))))
    found = sorted((t.batch_size, t.hyperparameters["patience"]) for t in study.trials)
    assert found == [(32, 1), (32, 2)]
