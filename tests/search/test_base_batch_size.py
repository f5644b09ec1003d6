"""The batch size that the learning rate suits: it is always tried, and compared with."""

import numpy as np
import pytest
import searches

import kbatch


@pytest.mark.parametrize(
    ("batch_sizes", "chosen", "base", "tried"),
    [
        ((16, 64), None, 32, (16, 32, 64)),
        ((8, 16), None, 16, (8, 16)),
        ((64, 128), None, 64, (64, 128)),
        ((48,), None, 48, (48,)),
        ((16, 32), np.int64(8), 8, (8, 16, 32)),
    ],
)
def test_it_is_keras_default_or_the_nearest_size(batch_sizes, chosen, base, tried):
    found = searches.stock(batch_sizes=batch_sizes, base_batch_size=chosen)
    assert (found.base_batch_size, found.batch_sizes) == (base, tried)


def test_it_is_tried_compared_with_and_kept_by_a_search_that_goes_on(tmp_path):
    settings = {"learning_rate_scaling": "linear", "base_batch_size": None}
    sizes = searches.stock(batch_sizes=(8, 16), **settings)
    study = kbatch.load_study(searches.quick(tmp_path, sizes, kbatch.BatchSizeTuner))
    assert study.search.settings["base_batch_size"] == study.decide().base_batch_size == 16
    assert study.decide().changes.keys() == {8}
    more = searches.stock(batch_sizes=(8, 16, 48), **settings)
    again = kbatch.load_study(searches.quick(tmp_path, more, kbatch.BatchSizeTuner))
    # The default would be 32 now, and another search.
    assert [trial.batch_size for trial in again.trials] == [8, 16, 48]
    assert again.trials[:2] == study.trials
    assert again.trials[2].executions[0].scaling.kappa == 3
