import json
import os
import signal

import keras_tuner
import pytest
from keras_tuner.src.engine.trial import Trial
from records_factory import make_execution, make_trial

from kbatch.records.json_codec import write_record
from kbatch.search.oracle import BatchSizeOracle
from kbatch.search.trial_states import read_trials, search_lock, write_trial


def written(folder, number, accuracy=0.5, *, status="COMPLETED", ended="completed"):
    """Write both files of a trial; keras-tuner's says nothing of how it ended."""
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [16, 32])
    write_trial(Trial(space, f"{number:04d}", status), folder)
    execution = make_execution(16, accuracies=(accuracy,), status=ended)
    record = make_trial(16, execution, trial_id=f"{number:04d}")
    write_record(record, folder / f"trial_{number:04d}" / "kbatch.json")


def state(folder, number):
    return folder / f"trial_{number:04d}" / "trial.json"


def test_trials_come_back_by_their_ids_as_their_records_say(tmp_path):
    for number in (11, 2, 1):
        written(tmp_path, number, accuracy=number / 100)
    found = read_trials(tmp_path)
    assert [t.trial_id for t in found] == ["0001", "0002", "0011"]
    assert [t.score for t in found] == [0.01, 0.02, 0.11]
    assert {t.status for t in found} == {"COMPLETED"}
    assert [len(t.hyperparameters.space) for t in found] == [1, 1, 1]


def test_a_trial_that_keras_tuner_says_has_not_ended_runs_again(tmp_path):
    written(tmp_path, 0, status="RUNNING", ended="failed")
    written(tmp_path, 1, ended="failed")
    assert [t.status for t in read_trials(tmp_path)] == ["RUNNING", "FAILED"]


def test_keras_tuner_reads_what_is_written(tmp_path):
    written(tmp_path, 0)
    assert Trial.load(str(state(tmp_path, 0))).hyperparameters.get("batch_size") == 16


def test_a_trial_without_a_record_is_named_and_runs_again(tmp_path):
    written(tmp_path, 0)
    (tmp_path / "trial_0000" / "kbatch.json").unlink()
    with pytest.warns(UserWarning, match="0000 is run again"):
        (found,) = read_trials(tmp_path)
    assert found.status == "RUNNING"


@pytest.mark.parametrize("text", ["", '{"status": 1', "[]", "\x00", "[" * 100_000, None])
def test_a_damaged_state_is_made_again_from_the_record(tmp_path, text):
    written(tmp_path, 0)
    before = json.loads(state(tmp_path, 0).read_text())
    state(tmp_path, 0).unlink() if text is None else state(tmp_path, 0).write_text(text)
    (found,) = read_trials(tmp_path)
    assert (found.status, found.score) == ("COMPLETED", 0.5)
    assert json.loads(state(tmp_path, 0).read_text())["trial_id"] == before["trial_id"]
    (tmp_path / "trial_0000" / "kbatch.json").write_text("{")
    state(tmp_path, 0).write_text(text or "")
    with pytest.warns(UserWarning, match="0000 is run again"):
        assert read_trials(tmp_path) == []


def test_a_trial_without_a_score_is_not_among_the_best(tmp_path):
    for number, value in enumerate((0.5, float("nan"), 0.7)):
        written(tmp_path, number, value)
    oracle = BatchSizeOracle(keras_tuner.Objective("val_accuracy", "max"), lambda *_: iter(()))
    oracle._set_project_dir(str(tmp_path.parent), tmp_path.name)
    oracle.reload()
    assert [t.trial_id for t in oracle.get_best_trials(3)] == ["0002", "0000"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_of_a_killed_search_does_not_keep_its_lock(tmp_path):
    """A pool of `concurrent.futures` forks its workers, which outlive a driver that is killed."""
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
