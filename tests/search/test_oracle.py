"""The oracle: the order of the grid, trials on disk, and the best trials."""

import os
import signal

import keras_tuner
import pytest
from keras_tuner.src.engine.trial import Trial, TrialStatus
from records_factory import make_execution, make_trial

from kbatch.records.json_codec import write_record
from kbatch.search.files import search_lock
from kbatch.search.oracle import BatchSizeOracle, read_trials, write_trial
from kbatch.search.race import grid, untried_in_grid


def plain():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16, 32])
    space.Choice("units", [4, 2, 8], default=2)
    space.Boolean("bias")
    space.Fixed("depth", 3)
    return space


def conditional():
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16])
    space.Choice("kind", ["mlp", "cnn"])
    with space.conditional_scope("kind", ["cnn"]):
        space.Int("filters", 4, 12, step=4)
    with space.conditional_scope("kind", ["mlp"]):
        space.Float("rate", 0.1, 0.3, step=0.1)
    return space


@pytest.mark.parametrize("space", [plain, conditional])
def test_grid_has_order_of_keras_tuner_from_any_start(space):
    oracle = keras_tuner.oracles.GridSearchOracle(
        keras_tuner.Objective("loss", "min"), hyperparameters=space()
    )
    oracle._save_trial = oracle.save = lambda *_: None
    oracle.verbose = 0
    found = []
    while (trial := oracle.create_trial("one")).status != TrialStatus.STOPPED:
        found.append(trial.hyperparameters.values)
        oracle.update_trial(trial.trial_id, {"loss": 0.0})
        trial.status = TrialStatus.COMPLETED
        oracle.end_trial(trial)
    assert list(grid(space())) == found
    for ended in range(len(found) + 1):
        assert list(untried_in_grid(space(), found[:ended])) == found[ended:]


def test_untried_in_grid_counts_default_of_later_hyperparameter_as_tried():
    space = plain()
    tried = list(grid(space))
    space.Choice("late", ["a", "b"])
    left = list(untried_in_grid(space, tried))
    assert len(left) == len(tried)
    assert {values["late"] for values in left} == {"b"}


def test_grid_of_range_without_step_ascends():
    space = keras_tuner.HyperParameters()
    space.Float("rate", 0.0, 1.0)
    found = [values["rate"] for values in grid(space)]
    assert found == sorted(found)
    assert (len(found), type(found[1])) == (11, float)


def written(folder, number, accuracy=0.5, *, status="COMPLETED", ended="completed"):
    """Write the record and the state of a trial."""
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [16, 32])
    trial = Trial(space, f"{number:04d}", status)
    trial.score = accuracy
    write_trial(trial, folder)
    execution = make_execution(16, accuracies=(accuracy,), status=ended)
    record = make_trial(16, execution, trial_id=f"{number:04d}")
    write_record(record, folder / f"trial_{number:04d}" / "kbatch.json")


def state(folder, number):
    return folder / f"trial_{number:04d}" / "trial.json"


def test_read_trials_in_order_with_status_of_keras_tuner(tmp_path):
    for number in (11, 2, 1):
        written(tmp_path, number, accuracy=number / 100)
    written(tmp_path, 12, status="RUNNING", ended="failed")
    found = read_trials(tmp_path)
    assert [t.trial_id for t in found] == ["0001", "0002", "0011", "0012"]
    assert [t.score for t in found] == [0.01, 0.02, 0.11, 0.5]
    assert [t.status for t in found] == ["COMPLETED"] * 3 + ["RUNNING"]
    assert [len(t.hyperparameters.space) for t in found] == [1, 1, 1, 1]


@pytest.mark.parametrize("text", ["", '{"status": 1', "[]", "\x00", "[" * 100_000, None])
def test_read_trials_restores_damaged_state_from_record(tmp_path, text):
    written(tmp_path, 0)
    state(tmp_path, 0).unlink() if text is None else state(tmp_path, 0).write_text(text)
    (found,) = read_trials(tmp_path)
    assert (found.trial_id, found.status) == ("0000", "RUNNING")
    assert found.hyperparameters.get("batch_size") == 16
    (tmp_path / "trial_0000" / "kbatch.json").write_text("{")
    with pytest.warns(UserWarning, match="0000 runs again"):
        assert read_trials(tmp_path) == []


def test_get_best_trials_leaves_out_trials_without_score(tmp_path):
    for number, value in enumerate((0.5, float("nan"), 0.7)):
        written(tmp_path, number, value)
    oracle = BatchSizeOracle(keras_tuner.Objective("val_accuracy", "max"))
    oracle._set_project_dir(str(tmp_path.parent), tmp_path.name)
    oracle.reload()
    assert [t.trial_id for t in oracle.get_best_trials(3)] == ["0002", "0000"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_search_lock_is_free_after_kill_despite_forked_child(tmp_path):
    """The workers of a forked pool outlive a search that is killed."""
    waiting, ending = os.pipe()
    driver = os.fork()
    if driver == 0:
        with search_lock(tmp_path):
            if os.fork() == 0:
                os.close(ending)
                os.read(waiting, 1)  # Until the test ends.
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(driver, 0)
    with search_lock(tmp_path):
        pass
    os.close(ending)
    os.close(waiting)
