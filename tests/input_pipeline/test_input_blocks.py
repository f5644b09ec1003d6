import contextlib
import itertools
import time

import numpy as np
import pytest

from kbatch.input_pipeline.blocks import (
    BlockLength,
    pipeline_block,
    rate_of,
    step_block,
    training_block,
)
from kbatch.training.data.batch_source import BatchSource

LENGTH = BlockLength(settle_s=0.001, measure_s=0.01, longest_s=10.0)


class Step:
    """A train step that does nothing and remembers what it was called with."""

    def __init__(self, *, forgetful=False):
        self.rows, self.restored, self.waited, self.forgetful = [], 0, 0, forgetful

    def __call__(self, batch):
        self.rows.append(len(batch))

    def launch(self, batch):
        self.rows.append(len(batch))

    def wait(self):
        self.waited += 1

    def has_seen(self, batch):
        return not self.forgetful and len(batch) in self.rows

    def restore(self):
        self.restored += 1


class Source:
    """Batches of given lengths, over and over; counts what was opened and closed."""

    def __init__(self, *rows):
        self.rows, self.opened, self.closed = rows, 0, 0

    @contextlib.contextmanager
    def open(self):
        self.opened += 1
        yield (np.zeros(n) for n in itertools.cycle(self.rows))
        self.closed += 1

    def given(self):
        return BatchSource("tf.data.Dataset", self.open, None, None)


def test_a_pipeline_is_opened_anew_and_closed_and_at_least_four_batches_are_counted():
    source = Source(8)
    block = pipeline_block(source.given(), BlockLength(0.0, 0.0, 10.0))
    assert (source.opened, source.closed) == (1, 1)
    assert (block.examples, block.spans) == (32, ())
    assert block.duration_s > 0
    assert block.first_batch_s >= 0


def test_a_block_that_lasts_too_long_ends_with_one_batch():
    block = pipeline_block(Source(8).given(), BlockLength(0.0, 1.0, 0.0))
    assert block.examples == 8


def test_a_step_alone_starts_from_the_same_state_in_each_block():
    step = Step()
    block = step_block(step, (np.zeros(8),), LENGTH)
    assert step.restored == 1
    assert block.examples % 8 == 0
    assert block.first_batch_s is None


def test_a_step_alone_takes_turns_with_batches_of_several_shapes():
    step = Step()
    block = step_block(step, (np.zeros(2), np.zeros(22), np.zeros(24)), LENGTH)
    counted = step.rows[-block.examples // 16 :]
    assert block.examples % 48 == 0
    assert step.rows.count(22) == step.rows.count(24) == block.examples // 48
    assert counted[-3:] == [2, 22, 24]


def test_training_counts_its_steps_and_their_waiting():
    step, source = Step(), Source(8)
    block = training_block(source.given(), step, LENGTH)
    assert (source.opened, source.closed, step.restored) == (1, 1, 1)
    assert block.examples == 8 * len(block.spans)
    assert block.duration_s == pytest.approx(sum(s.wait_s + s.compute_s for s in block.spans))
    assert block.spans[0].begin_s == 0
    begins = [span.begin_s for span in block.spans]
    assert begins == sorted(begins)
    rate = rate_of([block, block])
    assert rate.wait_s == pytest.approx((sum(s.wait_s for s in block.spans),) * 2)
    assert rate_of([step_block(step, (np.zeros(8),), LENGTH)]).wait_s == ()


def test_a_step_on_new_shapes_is_made_and_not_counted():
    step = Step()
    source = Source(8, 8, 8, 1000, 8, 1001, 8, 8, 8, 8, 8, 8)
    block = training_block(source.given(), step, BlockLength(0.0, 0.0, 10.0))
    assert {1000, 1001} <= set(step.rows)
    assert block.examples == 16


def test_shapes_that_never_repeat_are_counted_all_the_same():
    block = training_block(Source(8).given(), Step(forgetful=True), BlockLength(0.0, 0.0, 10.0))
    assert block.examples == 32


class Shuffled(Source):
    """Makes an epoch's batches while the first is waited for, as a large shuffle buffer does."""

    @contextlib.contextmanager
    def open(self):
        self.opened += 1

        def epoch():
            time.sleep(0.02 * len(self.rows))
            yield from (np.zeros(n) for n in self.rows)

        yield epoch()


def test_whole_epochs_count_with_their_start():
    length = BlockLength(settle_s=0.0, measure_s=0.0, longest_s=10.0, counting="epochs")
    source, warm = Shuffled(8, 8, 8, 8, 5), Step()
    warm.rows = [8, 5]
    for block in (
        pipeline_block(source.given(), length),
        training_block(source.given(), warm, length),
    ):
        assert block.examples == 37
        # The sleep alone takes so long; a burst of ready batches would be far quicker.
        assert block.duration_s >= 0.1


@pytest.mark.parametrize("measure_s", [0.0, 0.15, 0.3])
def test_every_block_of_epochs_counts_whole_ones(measure_s):
    length = BlockLength(settle_s=0.0, measure_s=measure_s, longest_s=0.0, counting="epochs")
    for _ in range(3):
        assert pipeline_block(Shuffled(8, 8, 8, 8, 5).given(), length).examples % 37 == 0


def test_all_from_the_start_counts_the_first_batch_and_its_wait():
    length = BlockLength(settle_s=0.0, measure_s=0.02, longest_s=10.0, counting="start")
    warm = Step()
    warm.rows = [8]
    for block in (
        pipeline_block(Shuffled(*[8] * 5).given(), length),
        training_block(Shuffled(*[8] * 5).given(), warm, length),
    ):
        assert block.examples == 32
        assert block.duration_s >= 0.1
    assert block.spans[0].wait_s >= 0.1


def test_steps_are_launched_together_and_waited_for_before_time_is_read():
    step = Step()
    step_block(step, (np.zeros(8),), BlockLength(0.0, 0.05, 10.0))
    assert 0 < step.waited < len(step.rows)


def test_the_work_of_a_step_on_new_shapes_is_not_counted_as_that_of_the_others():
    def busy(seconds):
        end_s = time.process_time() + seconds
        while time.process_time() < end_s:
            pass

    class Compiling(Step):
        def __call__(self, batch):
            busy(0.1 if len(batch) == 1000 else 0.0)
            super().__call__(batch)

    source = Source(8, 8, 8, 1000, 8, 8, 8, 8, 8)
    block = training_block(source.given(), Compiling(), BlockLength(0.0, 0.0, 10.0))
    assert block.cpu_s < 0.05
