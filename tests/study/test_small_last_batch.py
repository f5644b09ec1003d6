"""The note where the last batch of an epoch is small, and one of few updates."""

import pytest
from records_factory import make_epochs, make_study, make_trial

from kbatch.study.caveats import caveats


def noted(examples, *batch_sizes):
    trials = [make_trial(b, epochs=make_epochs((0.9,), examples=examples)) for b in batch_sizes]
    found = caveats(make_study(*trials))
    return [note.values for note in found if note.code == "small_last_batch"]


def test_the_note_names_the_sizes_and_the_examples_that_are_left():
    assert noted(1541, 32, 256, 512) == [
        {"sizes": "batch sizes 256 and 512", "examples": "5 examples"}
    ]
    assert noted(513, 512) == [{"sizes": "batch size 512", "examples": "1 example"}]


@pytest.mark.parametrize(
    ("examples", "batch_size"),
    [(1536, 512), (512 + 52, 512), (32 * 20 + 1, 32), (5, 64)],
)
def test_an_epoch_of_equal_batches_or_of_many_has_none(examples, batch_size):
    assert noted(examples, batch_size) == []
