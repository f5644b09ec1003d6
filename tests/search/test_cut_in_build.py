"""Searches of models whose build function has called `accumulate_gradients`."""

import keras
import pytest
import searches
import small_models

import kbatch

ops = keras.ops


def coupled(y_true, y_pred):
    """A loss that depends on the spread of all rows."""
    return ops.mean(ops.square(ops.one_hot(y_true, 3) - y_pred)) / (0.1 + ops.std(y_pred))


def build():
    return small_models.mlp(optimizer="sgd", loss=coupled)


def searched(directory, build, micro_batch_size="auto", **arguments):
    hypermodel = searches.hypermodel(
        build, (8, 32), micro_batch_size=micro_batch_size, dtype_policy="float32"
    )
    return kbatch.load_study(searches.quick(directory, hypermodel, **arguments))


def last_losses(study):
    return [trial.executions[0].epochs[-1].metrics["loss"] for trial in study.trials]


def codes(*trials):
    return {note.code for trial in trials for note in trial.notes}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return searched(tmp_path_factory.mktemp("whole"), build, None)


def test_search_of_exact_accumulation_trains_as_whole_batches(tmp_path, whole, recwarn):
    study = searched(tmp_path, lambda: kbatch.accumulate_gradients(build(), 12, exact=True))
    assert last_losses(study) == pytest.approx(last_losses(whole), rel=1e-5)
    assert [trial.executions[0].micro_batch_size for trial in study.trials] == [8, 12]
    assert "parts_differ" not in codes(*study.trials)
    assert not [one for one in recwarn if "another result" in str(one.message)]


def test_search_of_plain_accumulation_warns_that_parts_differ(tmp_path, whole):
    def cut():
        return kbatch.accumulate_gradients(build(), 12)

    with pytest.warns(UserWarning, match="Micro-batches change the result"):
        study = searched(tmp_path, cut, 16)
    assert [trial.executions[0].micro_batch_size for trial in study.trials] == [8, 12]
    small, large = study.trials
    assert "parts_differ" in codes(large) - codes(small)
    assert last_losses(study)[1] != pytest.approx(last_losses(whole)[1], rel=1e-3)
