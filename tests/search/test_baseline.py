"""The batch size that a search compares all others with."""

import numpy as np
import pytest
import searches

import kbatch


def search(directory, **arguments):
    hypermodel = searches.stock(batch_sizes=(16, 32))
    return searches.quick(directory, hypermodel, kbatch.BatchSizeTuner, **arguments)


def test_a_baseline_is_tried_compared_with_and_changed_without_another_search(tmp_path):
    tuner = search(tmp_path, baseline=np.int64(8))
    study = kbatch.load_study(tuner)
    assert [trial.batch_size for trial in study.trials] == [8, 16, 32]
    # What the sizes given decide stays: the learning rate is still that of 16.
    assert (study.search.settings["base_batch_size"], study.search.settings["baseline"]) == (16, 8)
    assert study.decide().changes.keys() == {16, 32}
    again = searches.stock(batch_sizes=(8, 16, 32), base_batch_size=16)
    other = searches.quick(tmp_path, again, kbatch.BatchSizeTuner, baseline=32)
    assert kbatch.load_study(other).decide().baseline == 32
    assert kbatch.load_study(other).trials == study.trials


@pytest.mark.parametrize("baseline", [0, 2.5, "32", True])
def test_a_baseline_that_is_no_size_is_refused(tmp_path, baseline):
    with pytest.raises((TypeError, ValueError), match="`baseline`"):
        search(tmp_path, baseline=baseline)
