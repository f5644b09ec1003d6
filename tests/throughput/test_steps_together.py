"""Several updates an execution: as many as were asked for, and the model is left as it was."""

import numpy as np
import pytest
import small_models as models

from kbatch.throughput.updates import micro_batch_steps
from kbatch.training.one_graph import execution_steps

BATCH = models.rows(8)


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_an_execution_makes_its_steps_and_the_model_stays(micro_batch_size):
    model = models.linear()
    model.fit(*BATCH, batch_size=8, verbose=0)
    before, made = model.get_weights(), int(model.optimizer.iterations)
    with micro_batch_steps(model) as steps:
        for asked in (None, 1, 5, 3, None):
            run = steps.step(BATCH, micro_batch_size, asked)
            run()
            made += asked or 1
            assert int(model.optimizer.iterations) == made
    assert model.steps_per_execution == 1
    assert int(model.optimizer.iterations) == 1
    for kept, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_an_execution_takes_a_tenth_of_a_second_or_an_epoch():
    assert [execution_steps(s, None) for s in (1.0, 0.03, 0.001)] == [1, 3, 100]
    assert execution_steps(0.001, 7) == 7
