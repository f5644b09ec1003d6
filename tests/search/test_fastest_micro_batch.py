import functools
import itertools
import json

import fake_nvml
import keras
import memory_models
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml

from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.device.gpus import NvmlGpu
from kbatch.device.memory import limited_cpu
from kbatch.device.worker import Worker
from kbatch.memory.record import MaxBatchSizeResult, ProbeRecord
from kbatch.records.usage import GpuProcess
from kbatch.search.auto_micro_batch import (
    MicroBatchCache,
    SearchMicroBatches,
    TrainingLeft,
)
from kbatch.throughput.choice import micro_batch_candidates
from kbatch.throughput.record import TrainingProfile
from kbatch.throughput.update_timing import time_micro_batches
from kbatch.timing.rounds import TimingPlan
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import sample_of

BRIEF = TimingPlan(time_budget_s=2.0, needed_calls=1, block_s=0.002, rounds_beyond=2, precision=0.0)
SOURCE = sample_of(FitData(*models.rows(94)))
LIMITS = {"memory_limit_bytes": None}


def find(
    directory,
    *,
    largest=64,
    batch_size=64,
    most=64,
    model=None,
    source=SOURCE,
    example_s=0.0,
    left=None,
):
    """What another search finds that has probed memory: `most` fit, with these seconds each."""
    model = models.mlp() if model is None else model
    search = SearchMicroBatches(largest_batch_size=largest, **LIMITS)
    cache = MicroBatchCache(search, model, models.mlp, source, directory)
    probe = ProbeRecord(most, 10**6, "fits", 0.1, step_s=example_s * most)
    search.known[cache.key] = max_batch_result(most, probe)
    return cache.fastest(batch_size, left)


@pytest.fixture
def briefly(monkeypatch):
    """Lets sizes be timed for a moment only, where it does not matter which is the fastest."""
    timing = functools.partial(time_micro_batches, timing=BRIEF)
    monkeypatch.setattr("kbatch.search.auto_micro_batch.time_micro_batches", timing)


def max_batch_result(size, *probes):
    arguments = ("all fit", True, 10**8, (0.8, 0.9), True, "CPU:0", "float32", 100)
    return MaxBatchSizeResult(size, *arguments, probes=probes)


def times(directory):
    return sorted((directory / "kbatch-micro-batches").glob("*-times.json"))


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A folder with the times of batches of 64 that were measured there."""
    directory = tmp_path_factory.mktemp("times")
    found = find(directory)
    return directory, found


@pytest.fixture
def planted(timed, tmp_path):
    """Makes a folder in which 16 examples at once were found to be the fastest."""
    (file,) = times(timed[0])
    content = json.loads(file.read_text())
    rounds = list(range(9))
    content["record"]["points"] = [
        {
            "micro_batch_size": size,
            "batch_size": 64,
            "outcome": "measured",
            "rounds": rounds,
            "step_times_s": [seconds + 1e-5 * number for number in rounds],
        }
        for size, seconds in ((8, 1.5e-3), (16, 1e-3), (32, 1.4e-3), (64, 2e-3))
    ]
    target = tmp_path / "kbatch-micro-batches" / file.name
    target.parent.mkdir()
    target.write_text(json.dumps(content))
    return tmp_path


def test_the_steps_that_will_run_are_timed_once_and_kept(timed):
    directory, found = timed
    (file,) = times(directory)
    profile = TrainingProfile.load(file)
    assert {point.batch_size for point in profile.points} == {64}
    assert profile.points[-1].micro_batch_size == 64
    assert {p.micro_batch_size for p in profile.points} <= {8, 16, 32, 64}
    left = {p.micro_batch_size for p in profile.measured if p.reason is not None}
    stayed = [p for p in profile.measured if p.reason is None]
    assert stayed[-1].micro_batch_size == 64
    assert len(stayed) <= 2
    assert len({p.rounds for p in stayed}) == 1
    assert found.size not in left
    assert found.search_s > 0
    assert found.size in {point.micro_batch_size for point in profile.measured}
    again = find(directory)
    assert (again.size, again.search_s) == (found.size, 0.0)
    assert len(times(directory)) == 1


def test_what_could_not_save_its_own_time_is_not_timed(tmp_path, planted):
    found = find(tmp_path / "none", most=32, left=TrainingLeft(train_s=60.0))
    assert (found.size, found.search_s) == (32, 0.0)
    assert "in about 60 s of training at the largest sizes" in found.notes[0]
    assert not times(tmp_path / "none")
    # What is known costs nothing.
    assert find(planted, left=TrainingLeft(train_s=60.0)).size == 16


@pytest.mark.parametrize(("train_s", "said"), [(80.0, "in about 80 s"), (None, "would take 20 s")])
def test_slow_updates_are_timed_only_where_more_training_repays_them(tmp_path, train_s, said):
    # An update takes 2 s.
    found = find(tmp_path, left=TrainingLeft(train_s=train_s), example_s=2 / 64)
    assert (found.size, found.search_s) == (64, 0.0)
    assert said in found.notes[0]
    assert not times(tmp_path)


def test_the_fastest_is_chosen(planted):
    found = find(planted)
    assert (found.size, found.search_s) == (16, 0.0)
    assert "Micro-batches of 16 train 1.96" in found.notes[0]


def test_of_those_that_fit(planted):
    assert find(planted, most=8).size == 8
    assert find(planted, most=20).size == 16
    (file,) = times(planted)
    content = json.loads(file.read_text())
    content["record"]["points"][2]["step_times_s"] = 9 * [5e-4]
    file.write_text(json.dumps(content))
    assert find(planted).size == 32
    assert find(planted, most=20).size == 16


def test_what_left_the_rounds_early_is_no_choice_while_what_beat_it_fits(planted):
    (file,) = times(planted)
    content = json.loads(file.read_text())
    points = {point["micro_batch_size"]: point for point in content["record"]["points"]}
    points[32] |= {"reason": "slower", "rounds": [0, 1], "step_times_s": [5e-4, 5e-4]}
    file.write_text(json.dumps(content))
    assert find(planted).size == 16
    for size in (8, 16):
        points[size]["outcome"], points[size]["reason"] = "not_run", "slower"
        points[size] |= {"rounds": [], "step_times_s": []}
    file.write_text(json.dumps(content))
    assert find(planted, most=40).size == 32


def test_a_batch_no_larger_than_the_choice_goes_through_whole_without_timing(planted):
    found = find(planted, batch_size=16)
    assert (found.size, found.search_s) == (16, 0.0)
    assert "whole" in found.notes[0]
    assert len(times(planted)) == 1


@pytest.mark.usefixtures("briefly")
def test_a_larger_one_than_the_choice_is_timed_itself(planted):
    found = find(planted, batch_size=32)
    assert found.search_s > 0
    assert found.size in (8, 16, 32)
    assert len(times(planted)) == 2


def test_batches_too_small_to_cut_are_not_timed(tmp_path):
    found = find(tmp_path, batch_size=15, most=15)
    assert (found.size, found.search_s) == (15, 0.0)
    assert find(tmp_path, batch_size=32, most=9).size == 8
    assert not times(tmp_path)


class Centred(keras.layers.Layer):
    """Looks at the whole batch, which no type tells."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@pytest.mark.parametrize("layer", [keras.layers.BatchNormalization, Centred])
def test_speed_does_not_decide_where_it_would_change_what_is_trained(tmp_path, layer):
    layers = keras.layers
    model = keras.Sequential([layers.Input((8,)), layer(), layers.Dense(3)])
    model.compile("adam", "mse")
    found = find(tmp_path, model=model)
    assert (found.size, found.search_s) == (64, 0.0)
    assert "may not train as the whole batch" in found.notes[0]
    assert not times(tmp_path)


@pytest.mark.usefixtures("briefly")
def test_data_that_end_before_the_largest_batch_leave_the_own_size_to_be_timed(tmp_path):
    def batches(size):
        return tf.data.Dataset.from_tensor_slices(models.rows(40)).batch(size)

    found = find(tmp_path, largest=256, batch_size=32, most=256, source=batches)
    assert found.search_s > 0
    assert found.size in (8, 16, 32)
    found = find(tmp_path, largest=256, batch_size=256, most=128, source=batches)
    assert found.size == 128
    assert "no step could be timed" in found.notes[0]


@pytest.mark.usefixtures("briefly")
def test_a_batch_that_the_device_has_no_room_for_leaves_the_own_size_to_be_timed(tmp_path):
    def batches(size):
        if size == 256:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return tf.data.Dataset.from_tensor_slices(models.rows(128)).batch(size)

    found = find(tmp_path, largest=256, batch_size=32, most=64, source=batches)
    assert found.search_s > 0
    assert found.size in (8, 16, 32)
    found = find(tmp_path, largest=256, batch_size=256, most=64, source=batches)
    assert (found.size, found.most) == (64, 64)
    assert "no step could be timed" in found.notes[0]


@pytest.mark.usefixtures("briefly")
def test_a_damaged_file_is_measured_again(planted):
    (file,) = times(planted)
    for content in ("", file.read_text().replace("TrainingProfile", "MaxBatchSizeResult")):
        file.write_text(content)
        assert find(planted).search_s > 0
        TrainingProfile.load(file)


@pytest.mark.usefixtures("briefly")
def test_another_model_or_limit_has_times_of_its_own(timed, tmp_path):
    assert find(timed[0], model=models.mlp(optimizer="sgd")).search_s > 0


def test_timing_leaves_the_model_as_it_was():
    model, batch = models.mlp(), tuple(map(tf.constant, models.rows(64)))
    model.fit(*batch, verbose=0)
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    points, _ = time_micro_batches(model, batch, largest=64, moments_every=8, timing=BRIEF)
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "train_step" not in vars(model)
    assert points[-1].measured
    assert all(p.outcome in ("measured", "not_run") for p in points)


@pytest.mark.slow
def test_what_runs_out_of_memory_when_it_is_timed_is_not_chosen():
    """Real want of memory, in a process whose allocator has 90 MiB: 256 images fit, 512 do not."""

    def there():
        keras.config.set_dtype_policy("float32")
        batch = tuple(map(tf.constant, memory_models.images(512)))
        model = memory_models.conv_net()
        points, _ = time_micro_batches(model, batch, largest=512, moments_every=0, timing=BRIEF)
        return points, model.optimizer.iterations.numpy()

    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | limited_cpu(90 * 2**20)
    with Worker(environment) as worker:
        points, updates = worker.call(there)
    outcomes = {p.micro_batch_size: p.outcome for p in points}
    assert outcomes[512] == "out_of_memory"
    assert "measured" in outcomes.values()
    assert updates == 0


@pytest.mark.parametrize("batch_size", range(1, 70))
def test_candidates_are_equal_parts_each_at_most_half_the_last(batch_size):
    for largest in (*range(1, 70), 1000):
        sizes = micro_batch_candidates(batch_size, largest)
        assert sizes[0] <= min(batch_size, largest)
        assert all(b <= a // 2 for a, b in itertools.pairwise(sizes))
        for size in sizes:  # No fewer parts of that size or less exist.
            parts = -(-batch_size // size)
            assert -(-batch_size // parts) == size
        if largest >= batch_size:
            assert sizes[0] == batch_size


@pytest.mark.usefixtures("briefly")
def test_times_beside_another_process_are_not_kept_and_say_so(monkeypatch, tmp_path):
    beside = (GpuProcess(4711, None),)
    monkeypatch.setattr("kbatch.search.auto_micro_batch.other_processes", lambda: beside)
    found = find(tmp_path)
    assert "process 4711 an unknown part. So times are not kept" in found.notes[0]
    assert not times(tmp_path)


@pytest.mark.usefixtures("briefly")
def test_times_hold_under_about_the_same_power_cap(monkeypatch, tmp_path):
    here = functools.partial(GpuMonitor, find_gpus=lambda: {"00000000:01:00.0": ("GPU:0",)})
    monkeypatch.setattr("kbatch.throughput.update_timing.GpuMonitor", here)
    monkeypatch.setattr("kbatch.search.auto_micro_batch.gpu_visible", lambda: True)

    def searched_s(watts):
        fake_nvml.install(monkeypatch, FakeNvml(FakeGpu(power_cap_mw=1000 * watts)))
        gpu = NvmlGpu(None, None, "00000000:01:00.0", None, power_cap_w=watts)
        monkeypatch.setattr("kbatch.search.auto_micro_batch.nvml_gpu", lambda: gpu)
        return find(tmp_path).search_s

    assert searched_s(512) > 0
    # 512 W is a border of powers of two: what moves a little there is the same cap.
    assert searched_s(500) == searched_s(540) == searched_s(512) == 0
    assert searched_s(300) > 0
    assert searched_s(300) == 0


def test_the_gpu_is_read_between_the_rounds(monkeypatch):
    fake_nvml.install(monkeypatch, FakeNvml(FakeGpu(throttle_bits=0x4)))
    here = functools.partial(GpuMonitor, find_gpus=lambda: {"00000000:01:00.0": ("GPU:0",)})
    monkeypatch.setattr("kbatch.throughput.update_timing.GpuMonitor", here)
    batch = tuple(map(tf.constant, models.rows(16)))
    points, gpus = time_micro_batches(
        models.mlp(), batch, largest=16, moments_every=0, timing=BRIEF
    )
    assert any(p.rounds for p in points)
    assert len(gpus[0].samples) > 2
    assert gpus[0].throttle_reasons == ("power cap",)
    assert [gpu.power_cap_w for gpu in gpus] == [700.0]
