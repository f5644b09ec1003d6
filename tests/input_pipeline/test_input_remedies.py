from batch_data import examples

from kbatch.input_pipeline.blocks import InputPass, PreparedInput
from kbatch.input_pipeline.changes import pipeline_changes, try_changes
from kbatch.input_pipeline.rates import LongRun
from kbatch.input_pipeline.record import LongRunRecord
from kbatch.training.data.batch_source import source_of_dataset


class Step:
    """A train step that does nothing."""

    def __call__(self, batch):
        pass

    def has_seen(self, batch):
        return True

    def restore(self):
        pass


def tried(*, batch_s, budget_s, even=True, duration_s=1.0):
    dataset = examples(80).batch(8)
    counted = LongRun("whole epochs", round(8 * duration_s / batch_s), duration_s, 0, 0.0)
    reading = InputPass(LongRunRecord(counted, 0.0), (), None, duration_s, 64.0, ())
    source, batches = source_of_dataset(dataset), (next(iter(dataset)),)
    prepared = PreparedInput(source, reading, Step(), batches, {}, 0.0, ())
    return try_changes(pipeline_changes(dataset), prepared, even=even, budget_s=budget_s)


def test_changes_for_which_there_is_no_time_say_how_much_they_need():
    slow = {"batch_s": 10.0, "duration_s": 100.0}
    uneven = {"batch_s": 1e-3, "duration_s": 20.0, "even": False}
    for settings in (slow, uneven):
        remedies, untried = tried(budget_s=0.2, **settings)
        assert remedies == ()
        reasons = {one.name: one.reason for one in untried}
        # Three rounds of the original and two changes, each of 20 s.
        assert "all changes need about 180 s" in reasons["prefetch"]


def test_as_many_changes_are_tried_as_there_is_time_for():
    remedies, untried = tried(batch_s=0.01, budget_s=0.1)
    assert [one.name for one in remedies] == ["prefetch"]
    assert "no time" in {one.name: one.reason for one in untried}["private thread pool"]
    names = {one.name for one in tried(batch_s=0.01, budget_s=0.3)[0]}
    assert names == {"prefetch", "private thread pool"}
