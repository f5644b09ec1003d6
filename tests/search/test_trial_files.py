import json
import os
import signal

import keras_tuner
import numpy as np
import pytest
from keras_tuner.src.engine.trial import Trial

from kbatch.search.oracle import BatchSizeOracle
from kbatch.search.trial_files import read_trial_states, search_lock, write_trial_state


def trial(number, score=0.5):
    space = keras_tuner.HyperParameters()
    space.Choice("batch_size", [8, 16])
    made = Trial(space, f"{number:04d}", "COMPLETED", "a message")
    made.metrics.update("val_accuracy", 0.5, step=3)
    made.score, made.best_step = score, 3
    return made


def file(folder, number):
    return folder / f"trial_{number:04d}" / "trial.json"


@pytest.mark.parametrize("score", [0.5, np.float32(0.5), None])
def test_a_trial_comes_back_as_it_was(tmp_path, score):
    write_trial_state(trial(0, score), tmp_path)
    (found,) = read_trial_states(tmp_path)
    assert found.get_state() == trial(0, score).get_state()


def test_keras_tuner_reads_the_files_and_its_own_are_read(tmp_path):
    write_trial_state(trial(0), tmp_path)
    assert Trial.load(str(file(tmp_path, 0))).score == 0.5
    file(tmp_path, 1).parent.mkdir()
    trial(1).save(str(file(tmp_path, 1)))
    assert len(read_trial_states(tmp_path)) == 2


DAMAGE = ["", '{"status": 1', '{"trial_id": "0000"}', "[]", "\x00", "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGE, ids=range(6))
def test_a_damaged_file_is_named_and_passed_over(tmp_path, text):
    write_trial_state(trial(1), tmp_path)
    write_trial_state(trial(0), tmp_path)
    file(tmp_path, 0).write_text(text)
    with pytest.warns(UserWarning, match=r"trial_0000.*damaged"):
        found = read_trial_states(tmp_path)
    assert [t.trial_id for t in found] == ["0001"]


@pytest.mark.parametrize(
    "changed",
    [
        {"score": "0.5"},
        {"status": "LOST"},
        {"trial_id": 0},
        {"trial_id": "../0000"},
        {"trial_id": "0001"},
        {"metrics": None},
    ],
)
def test_a_state_that_says_something_impossible_is_passed_over(tmp_path, changed):
    write_trial_state(trial(1), tmp_path)
    write_trial_state(trial(0), tmp_path)
    state = json.loads(file(tmp_path, 0).read_text())
    file(tmp_path, 0).write_text(json.dumps(state | changed))
    with pytest.warns(UserWarning, match=r"trial_0000.*damaged"):
        found = read_trial_states(tmp_path)
    assert [t.trial_id for t in found] == ["0001"]


@pytest.mark.parametrize("score", [None, float("nan")])
def test_a_trial_without_a_score_is_not_among_the_best(tmp_path, score):
    for number, value in enumerate((0.5, score, 0.7)):
        write_trial_state(trial(number, value), tmp_path)
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
