import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from input_profile_factory import make_long_run, make_profile
from recommendation_factory import (
    PER_EXAMPLE_S,
    SIZES,
    make_check,
    make_fit_times,
    make_memory,
    make_pilot,
    make_recommendation,
    make_timings,
)

from kbatch.analysis.next_size import FinishedRun
from kbatch.analysis.noise_scale import noise_scale_of_epochs
from kbatch.recommendation.choice import trained_runs
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, PilotStretch, useful_count
from kbatch.recommendation.record import Recommendation
from kbatch.records.json_codec import RecordError
from kbatch.throughput.record import TimedRounds

NOTHING = {"timings": (), "memory": None, "pilot": None, "pipeline": None, "fit_times": ()}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {**NOTHING, "unknown": {"memory": "there is none"}, "environment": None},
        {"checks": (make_check(128, 260), make_check(64, 400, "lost"))},
        {"pilot": make_pilot(held_out=False), "notes": ("one",), "base_learning_rate": None},
    ],
)
def test_a_recommendation_is_read_as_it_was_written(tmp_path, changed):
    made = make_recommendation(**changed)
    made.save(tmp_path / "there" / "found.json")
    read = Recommendation.load(str(tmp_path / "there" / "found.json"))
    assert read == made
    assert (read.batch_size, read.binding) == (made.batch_size, made.binding)


def test_a_file_of_something_else_is_named(tmp_path):
    make_memory().save(tmp_path / "memory.json")
    with pytest.raises(RecordError, match=r"memory\.json holds a MaxBatchSizeResult"):
        Recommendation.load(tmp_path / "memory.json")


def test_the_size_is_near_the_closed_form():
    for n_half, scale in itertools.product([10.0, 100.0, 800.0], [30.0, 200.0, 3000.0]):
        found = make_recommendation(n_half=n_half, noise_scale=scale)
        exact = min(max(math.sqrt(n_half * scale), SIZES[0]), SIZES[-1])
        assert abs(math.log2(found.batch_size / exact)) <= 1
        if found.batch_size < SIZES[-1]:  # Which is timed in parts alone.
            assert found.micro_batch_size == found.batch_size
        # Which one binds, by the noise scale of the pilot.
        alone = make_recommendation(n_half=n_half, noise_scale=scale, checks=())
        assert alone.binding == (
            ("hardware saturation",) if 9 * n_half < scale else ("gradient noise",)
        )


def test_more_noise_never_asks_for_a_smaller_batch():
    scales = [3.0, 30.0, 300.0, 3000.0]
    sizes = [make_recommendation(noise_scale=scale).batch_size for scale in scales]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_memory_binds_where_it_ends_the_sizes():
    few = make_recommendation(
        n_half=300, noise_scale=2000.0, timings=make_timings(300, fits=32), memory=make_memory(40)
    )
    assert few.memory_ends
    assert few.binding == ("memory",)
    # The same times, where the data and not memory end the sizes that were run whole.
    enough = make_recommendation(
        n_half=300, noise_scale=2000.0, timings=make_timings(300, fits=32), memory=make_memory(2000)
    )
    assert not enough.memory_ends
    assert "memory" not in enough.binding


def test_a_slow_pipeline_binds_and_takes_the_batch_down():
    slow = make_recommendation(input_rate=15_000.0)
    assert slow.binding == ("input pipeline",)
    assert slow.batch_size < make_recommendation().batch_size


def test_the_learning_rate_follows_by_its_rule():
    plain = make_recommendation(learning_rate_rule=None)
    assert plain.learning_rate == 0.001
    root, linear = make_recommendation(), make_recommendation(learning_rate_rule="linear")
    assert root.batch_size == 128
    assert root.learning_rate == pytest.approx(0.002)
    assert linear.learning_rate == pytest.approx(0.004)
    assert make_recommendation(base_learning_rate=None).learning_rate is None


def test_the_base_size_is_kept_where_it_alone_was_trained():
    for scatter in (0.05, 30.0):
        alone = make_recommendation(pilot=make_pilot(200, scatter=scatter), checks=())
        assert (alone.batch_size, alone.learning_rate, alone.micro_batch_size) == (32, 0.001, 32)
        assert {128, 256} <= {one.batch_size for one in alone.decision.untested}
    assert alone.noise_scale.value is None
    assert alone.binding == ("hardware saturation", "gradient noise")
    missing = make_recommendation(pilot=None)
    assert (missing.batch_size, missing.decision.missing) == (None, "no pilot")
    assert missing.micro_batch_size == SIZES[-1]  # The fastest.


def few_updates(count, *, fall=1.0, scatter=0.0):
    """A pilot of one update a stretch."""
    rng = np.random.default_rng(1)
    losses = 2.0 - fall * np.arange(count) / count + scatter * rng.normal(size=count)
    stretches = tuple(PilotStretch(1, 2.0, loss, 200.0, 1.0) for loss in losses.tolist())
    return dataclasses.replace(make_pilot(ended_by="budget"), stretches=stretches)


@pytest.mark.parametrize(
    ("pilot", "missing"),
    [
        (few_updates(9), "few updates"),
        (few_updates(60), None),
        (few_updates(60, scatter=0.01), None),
        (few_updates(60, fall=0.0), "no progress"),
        (few_updates(60, fall=0.05, scatter=0.5), "no progress"),
        (make_pilot(stretches=0), "few updates"),
        (dataclasses.replace(make_pilot(), ended_by="diverged"), "pilot diverged"),
    ],
)
def test_a_pilot_that_resolved_nothing_names_no_size(pilot, missing):
    assert pilot.missing == missing
    found = make_recommendation(pilot=pilot, checks=())
    assert (found.batch_size is None) == (missing is not None)
    assert found.decision.missing == missing


def test_an_update_in_fit_is_a_line_through_what_was_measured():
    found = make_recommendation(input_rate=1e4, fit_times=make_fit_times(100.0, 1e4, epoch_s=0.044))
    # 3.2 ms and 25.6 ms for the batches; 44 and 5 of them share an epoch's 44 ms.
    line, own = found.in_fit.line, found.in_fit.own
    assert line.time_s(32) == pytest.approx(3.2e-3 + 1e-3)
    assert line.time_s(256) == pytest.approx(25.6e-3 + 8.8e-3)
    # What is not the data's is the smaller wait, that of 32 examples.
    assert own.time_s(32) == pytest.approx(3.2e-3)
    assert own.time_s(256) == pytest.approx(3.56e-3 + 1.88e-3)
    slow, fast = found.in_fit.ends
    assert slow.time_s(256) > line.time_s(256) > fast.time_s(256)
    with pytest.raises(ValueError, match="one value a round of each kind"):
        FitTime(8, (1.0,), (1.0, 2.0), (0.0,), None)


def test_parts_that_run_faster_than_the_whole_batch_gain_in_fit_too():
    whole = make_timings(100)
    halves = [
        dataclasses.replace(
            one, micro_batch_size=32, durations_s=tuple(s / 2 for s in one.durations_s)
        )
        for one in whole
        if one.micro_batch_size == one.batch_size > 32
    ]
    timings = (*(t for t in whole if t.micro_batch_size == t.batch_size), *halves)
    found = make_recommendation(noise_scale=2000.0, timings=timings)
    assert found.micro_batch_size == 32 < found.batch_size
    by_size = {row.batch_size: row.samples_per_second.value for row in found.decision.sizes}
    assert by_size[256] == pytest.approx(2 * 256 / (PER_EXAMPLE_S * 356), rel=0.02)


def test_the_pipeline_is_a_floor_and_alone_the_line_of_a_file_without_fit():
    bursts = make_profile(
        batch_size=256, pipeline=1e6, step=50_000, long_run=make_long_run(8_000, 20_000)
    )
    found = make_recommendation(pipeline=bursts)
    slow, fast = found.in_fit.ends
    assert slow.time_s(256) == pytest.approx(256 / 8_000)
    assert found.in_fit.line.time_s(256) == pytest.approx(256 / 20_000)
    assert fast.time_s(256) == pytest.approx(256 / 20_000)
    assert found.binding == ("input pipeline",)
    older = make_recommendation(input_rate=5_000.0, fit_times=())
    assert older.in_fit.line.time_s(256) == pytest.approx(256 / 5_000, rel=0.02)
    assert older.binding == ("input pipeline",)


def test_epochs_that_cost_much_take_the_batch_down_and_bind():
    short = make_recommendation(noise_scale=2000.0, fit_times=make_fit_times(epoch_s=0.1))
    assert short.binding == ("input pipeline",)
    assert short.batch_size < make_recommendation(noise_scale=2000.0).batch_size


def needed(size):
    """Updates that fall with the root of the batch, beyond any noise scale."""
    return round(525 * math.sqrt(32 / size))


def runs_of(found):
    return trained_runs(
        found.timings, in_fit=found.in_fit.line, pilot=found.pilot, checks=found.checks
    ).tried


def test_trained_sizes_decide():
    device = {"n_half": 800.0, "noise_scale": 60.0}
    checks = tuple(make_check(size, needed(size)) for size in (128, 512))
    found = make_recommendation(**device, checks=checks)
    assert found.batch_size == 512
    assert found.critical.value > found.noise_scale.value
    assert [run.updates for run in runs_of(found)] == [525, needed(128), needed(512)]
    assert found.learning_rate == pytest.approx(0.001 * math.sqrt(found.batch_size / 32))
    rows = {row.batch_size: row for row in found.decision.sizes}
    assert rows[found.batch_size].relative_time.value == 1
    for size in (32, 128, 512):
        assert rows[size].updates.value == pytest.approx(needed(size), rel=0.1)


def test_a_size_that_missed_the_loss_is_not_chosen():
    lost = (make_check(256, 900, "lost"), make_check(64, 380))
    found = make_recommendation(noise_scale=2000.0, checks=lost)
    assert [run.cost is None for run in runs_of(found)] == [False, True, False]
    assert found.batch_size == 64
    with pytest.raises(ValueError, match=r"`ended_by` must be one of.*'tired'"):
        make_check(64, 1, "tired")


def test_a_pilot_that_diverged_names_no_size_whatever_was_trained_beside_it():
    pilot = dataclasses.replace(make_pilot(), ended_by="diverged")
    for checks in ((), (make_check(256, 150),)):
        found = make_recommendation(pilot=pilot, checks=checks)
        assert found.diverged
        assert (found.batch_size, found.learning_rate) == (None, None)


@pytest.mark.parametrize("ended_by", ["diverged", "failed"])
def test_a_size_that_diverged_or_failed_is_no_evidence_and_ends_the_larger_ones(ended_by):
    found = make_recommendation(noise_scale=2000.0, checks=(make_check(256, 4, ended_by),))
    alone = make_recommendation(noise_scale=2000.0, checks=())
    assert runs_of(found)[-1] == FinishedRun(256, None, None)
    rows, before = ({r.batch_size: r for r in f.decision.sizes} for f in (found, alone))
    assert rows[256].ended_by == "diverged"
    assert all(rows[size].updates == before[size].updates for size in SIZES if size != 256)
    assert {one.batch_size for one in found.decision.untested} == {64, 128}


def test_the_size_of_the_pilot_has_a_row_where_it_was_not_timed():
    sizes = (256, 512, 1024)
    changed = {"timings": make_timings(sizes=sizes), "checks": (make_check(256, 4, "diverged"),)}
    found = make_recommendation(**changed)
    step_s = PER_EXAMPLE_S * (100 + 32)
    assert runs_of(found)[0].cost == pytest.approx(525 * step_s, rel=0.02)
    assert found.batch_size == 32
    assert [row.batch_size for row in found.decision.sizes if row.ended_by] == [32, 256]
    assert str(found).startswith("Keep batch size 32")


def test_without_timings_nothing_is_recommended():
    empty = make_recommendation(**NOTHING)
    assert (empty.batch_size, empty.micro_batch_size) == (None, None)
    assert empty.decision.missing == "no times"
    assert (empty.binding, empty.saturation) == ((), None)
    one = make_recommendation(timings=make_timings()[2:3])
    assert one.batch_size == 32
    assert one.saturation is None
    assert one.binding == ("hardware saturation", "gradient noise")


def test_single_times_of_each_size_name_no_saturation():
    # What a call of 60 s timed after a pilot of 73 s.
    times = ((8, 0.000697), (16, 0.000859), (32, 0.000725))
    once = make_recommendation(timings=[TimedRounds(b, b, (0,), (s,)) for b, s in times])
    assert once.saturation is None
    assert "saturation: cannot tell" in str(once)
    assert once.binding == ("hardware saturation", "gradient noise")
    twice = [TimedRounds(b, b, (0, 1), (s, 1.01 * s)) for b, s in times]
    assert make_recommendation(timings=twice).saturation.batch_size == 29


def test_a_file_without_an_answer_has_that_of_its_version():
    older = make_recommendation(older=True)
    # By the noise scale alone, beyond which the learning rate did not go.
    assert older.decision.older
    assert older.batch_size == 128
    assert older.learning_rate == pytest.approx(0.002)
    capped = make_recommendation(older=True, n_half=800, noise_scale=50.0)
    scale = round(capped.noise_scale.value)
    assert capped.batch_size > 50
    assert capped.learning_rate == pytest.approx(0.001 * math.sqrt(scale / 32))
    vague = make_recommendation(older=True, pilot=make_pilot(200, scatter=30.0))
    assert (vague.batch_size, vague.decision.missing) == (None, "untold")
    # By trained sizes it named one that was not trained itself.
    checks = tuple(make_check(size, needed(size)) for size in (128, 512))
    between = make_recommendation(older=True, n_half=400.0, noise_scale=60.0, checks=checks)
    assert between.batch_size == 256
    assert between.learning_rate == pytest.approx(0.001 * math.sqrt(8))
    broken = dataclasses.replace(make_pilot(), ended_by="diverged")
    assert make_recommendation(older=True, pilot=broken).batch_size is None
    assert make_recommendation(older=True, **NOTHING).decision.missing == "no times"


def test_an_answer_is_kept_with_its_file_and_never_derived_again(tmp_path):
    older = make_recommendation(older=True)
    older.save(tmp_path / "found.json")
    assert Recommendation.load(tmp_path / "found.json") == older
    other = dataclasses.replace(older.decision, batch_size=64)
    dataclasses.replace(older, decision=other).save(tmp_path / "other.json")
    assert Recommendation.load(tmp_path / "other.json").batch_size == 64


@pytest.mark.parametrize("held_out", [True, False])
def test_a_pilot_counts_until_its_loss_has_gone_98_percent_of_its_way(held_out):
    pilot = make_pilot(stretches=40, held_out=held_out)
    assert (pilot.updates, pilot.useful_updates) == (1000, 525)
    assert pilot.useful == pilot.stretches[:21]
    expected = noise_scale_of_epochs(
        [s.gradient_variance for s in pilot.stretches[:21]],
        [s.gradient_squared_norm for s in pilot.stretches[:21]],
    )
    assert pilot.noise_scale.value == pytest.approx(expected.value)
    assert pilot.noise_scale.measurements == 11
    assert pilot.noise_scale.value == pytest.approx(200, rel=0.1)


def stretches_of(losses):
    return [PilotStretch(25, loss, None, 100.0, 1.0) for loss in losses]


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ((2.0, 1.0, 0.06, 0.03, 0.02, 0.0), 4),
        ((2.0, 1.0, 0.0, 1.0, 1.0), 3),
        ((2.0, 2.0, 2.0), 3),
        ((1.0, 2.0, 3.0), 3),
        ((None, 2.0, 1.0), 3),
        ((2.0, 0.0, None), 2),
        ((), 0),
    ],
)
def test_useful_stretches_end_near_the_lowest_loss(losses, count):
    assert useful_count(stretches_of(losses), 0.98) == count


def test_the_target_lies_at_the_share_that_is_recorded():
    stretches = tuple(stretches_of([2.1, 1.1, 0.25, 0.12, 0.1, 0.1]))
    early = PilotRecord(32, 8, 0.001, stretches, 1.0, "progress", target_share=0.9)
    assert (early.target, early.updates_to_target) == (pytest.approx(0.3), 75)
    late = dataclasses.replace(early, target_share=0.98)
    assert (late.target, late.updates_to_target) == (pytest.approx(0.14), 100)


def test_a_file_without_the_share_keeps_the_target_of_its_version(tmp_path):
    path = tmp_path / "found.json"
    made = make_recommendation(pilot=make_pilot(target_share=0.9))
    made.save(path)
    assert Recommendation.load(path) == made
    text = path.read_text()
    assert text.count('"target_share"') == 1
    path.write_text(re.sub(r',\s*"target_share": 0\.9', "", text))
    older = Recommendation.load(path)
    assert older.pilot == make_pilot()
    assert older.pilot.target < made.pilot.target
    assert "98 % of its progress" in " ".join(str(older).split())
    assert "90 % of its progress" in " ".join(str(made).split())


def test_a_pilot_has_six_useful_stretches_at_least():
    stretches = tuple(stretches_of([2.0, 0.1, *[0.1] * 18]))
    assert PilotRecord(32, 8, 0.001, stretches, 1.0, "progress").useful == stretches[:6]
    lost = tuple(PilotStretch(25, None, None, None, None) for _ in range(4))
    unresolved = PilotRecord(32, 8, None, lost, 1.0, "diverged")
    assert unresolved.noise_scale.value is None
    assert PilotRecord(32, 8, None, (), 1.0, "budget").noise_scale.measurements == 0
    with pytest.raises(ValueError, match=r"`ended_by` must be one of.*'boredom'"):
        PilotRecord(32, 8, None, (), 1.0, "boredom")
