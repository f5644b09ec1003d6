"""The training clock, its windows of steady steps, and their throughput."""

import numpy as np
import pytest

from kbatch.records.training_run import throughput_of_windows
from kbatch.training.callbacks import TrainingClock, steady_windows
from kbatch.training.data.batches import InputReading


class FakeMeter:
    def __init__(self):
        self.reading = InputReading(0, 0, 0, 0.0, 0.0)

    def deliver(self, examples, shape):
        batches, before, largest, wait_s, *_ = self.reading
        self.reading = InputReading(
            batches + 1, before + examples, max(largest, examples), wait_s + 0.25, shape
        )

    def begin_epoch(self):
        pass

    def end_step(self):
        pass

    def read(self):
        return self.reading


class Timeline:
    """Plays steps (examples, seconds) to a `TrainingClock`, with a fake time."""

    def __init__(self, **arguments):
        self.time_s = 0.0
        self.meter = FakeMeter()
        self.clock = TrainingClock(self.meter, now=lambda: self.time_s, **arguments)
        self.callbacks = [self.clock, self.clock.last]

    def epoch(self, number, steps, *, pause_s=0.0, logs=None):
        self.clock.on_epoch_begin(number)
        for step, (examples, seconds, *shape) in enumerate(steps):
            self.clock.on_train_batch_begin(step)
            self.time_s += pause_s  # Other callbacks.
            self.clock.last.on_train_batch_begin(step)
            self.meter.deliver(examples, *shape or [float(examples)])
            self.time_s += seconds
            self.clock.on_train_batch_end(step)
        logs = {} if logs is None else logs
        self.time_s += 100.0  # Validation and checkpoints.
        self.clock.on_epoch_end(number, logs)
        self.clock.last.on_epoch_end(number, logs)
        return logs


def test_clock_excludes_first_steps_pauses_and_validation():
    line = Timeline()
    line.clock.on_train_begin()
    steps = [(32, 9.0), (32, 0.1), (32, 0.1), (32, 0.1), (30, 7.0)]
    line.epoch(0, steps, pause_s=3.0)
    line.epoch(1, [(32, 0.1), (32, 0.1), (32, 0.1), (32, 0.1), (30, 0.1)], pause_s=3.0)
    examples, durations_s = line.clock.windows
    assert sum(examples) == 7 * 32 + 30
    assert sum(durations_s) == pytest.approx(0.8)
    assert line.clock.first_step_s == 9.0
    assert line.clock.throughput.value == pytest.approx((7 * 32 + 30) / 0.8, rel=0.01)


def test_clock_records_each_epoch():
    line = Timeline()
    line.clock.on_train_begin()
    line.epoch(0, [(32, 1.0), (30, 1.0)], logs={"loss": 0.5, "per_class": np.zeros(3)})
    line.epoch(1, [(32, 0.5), (30, 0.5)], logs={"loss": float("nan")})
    first, second = line.clock.epochs
    assert (first.examples, first.batches, first.train_s, first.data_wait_s) == (62, 2, 2.0, 0.5)
    assert (second.examples, second.batches, second.train_s, second.data_wait_s) == (62, 2, 1, 0.5)
    assert first.metrics["loss"] == 0.5
    assert "per_class" not in first.metrics
    assert second.metrics["loss"] is None


def test_clock_excludes_first_step_of_each_fit():
    line = Timeline()
    for _ in range(2):
        line.clock.on_train_begin()
        line.epoch(0, [(32, 9.0), (32, 1.0), (32, 1.0)])
    assert sum(line.clock.windows[1]) == pytest.approx(4.0)


def test_clock_in_step_only_between_begin_and_end():
    line = Timeline()
    assert not line.clock.in_step
    line.clock.on_train_begin()
    line.clock.on_train_batch_begin(0)
    assert not line.clock.in_step  # Other callbacks.
    line.clock.last.on_train_batch_begin(0)
    assert line.clock.in_step
    line.clock.on_train_batch_end(0)
    assert not line.clock.in_step
    line.clock.last.on_train_batch_begin(1)
    line.clock.on_train_begin()
    assert not line.clock.in_step


@pytest.mark.parametrize(("exact", "steady_steps"), [(False, 6), (True, 3)])
def test_clock_excludes_new_shapes_under_xla(exact, steady_steps):
    line = Timeline(every_shape_compiles=exact)
    line.clock.on_train_begin()
    line.epoch(0, [(32, 1.0, 5.0), (32, 1.0, 5.0), (32, 1.0, 6.0), (32, 1.0, 7.0), (32, 1.0, 8.0)])
    line.epoch(1, [(32, 1.0, 5.0), (32, 1.0, 5.0)])
    assert sum(line.clock.windows[1]) == pytest.approx(steady_steps)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean_s", [1e-4, 1e-2, 0.2])
def test_steady_windows_contain_all_steps_within_limits(seed, mean_s):
    rng = np.random.default_rng(seed)
    examples, durations = rng.integers(1, 65, size=3000), rng.exponential(mean_s, size=3000)
    window_examples, window_durations = steady_windows([*zip(examples, durations, strict=True)])
    assert sum(window_examples) == sum(examples)
    np.testing.assert_allclose(sum(window_durations), sum(durations))
    assert min(window_durations) >= min(0.05, sum(durations) / 10)
    assert len(window_durations) <= 200


def test_steady_windows_of_short_or_no_training():
    assert steady_windows([(8, 0.01), (8, 0.01), (8, 0.02)]) == ([8, 8, 8], [0.01, 0.01, 0.02])
    assert steady_windows([]) == ([], [])
    assert throughput_of_windows([], []) is None


@pytest.mark.parametrize("step_s", [1e-4, 0.004, 0.1])
@pytest.mark.parametrize("steps", [6, 60, 1000])
@pytest.mark.parametrize("paused", [0.1, 0.5, 0.95])
def test_throughput_ignores_a_pause_of_the_process(step_s, steps, paused):
    def throughput():
        line = Timeline()
        line.clock.on_train_begin()
        line.epoch(0, [(32, 9.0)])
        line.epoch(1, played)
        return line.clock.throughput.value

    # Every tenth step takes three times as long.
    played = [(32, step_s * (3 if step % 10 == 9 else 1)) for step in range(steps)]
    expected = throughput()
    played[int(paused * steps)] = (32, 3600.0)
    assert throughput() == pytest.approx(expected, rel=0.1)
    assert expected == pytest.approx(32 / step_s / 1.2, rel=0.25)


def test_throughput_counts_regular_slow_windows():
    rng = np.random.default_rng(1)
    rates = rng.uniform(100, 200, size=50)
    found = throughput_of_windows([60] * 50, 60 / rates)
    parts = [600 / (60 / part).sum() for part in np.split(rates, 5)]
    assert found.value == pytest.approx(np.median(parts))
    np.testing.assert_allclose(found.ends, np.percentile(rates, [25, 75]))
    # A file is read before every tenth window.
    chunks = throughput_of_windows([100] * 100, ([0.1] * 9 + [5.0]) * 10)
    assert chunks.ends == (chunks.value, pytest.approx(1000))
    assert chunks.value == pytest.approx(1000 / 5.9)
    assert throughput_of_windows([100], [0.1]).ends is None
