"""The search for the largest batch, and the pass over given sizes, with computed probes."""

import pickle

import pytest

from kbatch.device.memory import FreeMemory
from kbatch.errors import OutOfMemoryError, WorkerDied
from kbatch.memory.find import memory_pass, probe_max_batch
from kbatch.memory.probe import MaxBatchExperiment
from kbatch.memory.workload import Reading, WorkloadFacts
from kbatch.records.notes import Note

LIMIT = 10_000


class ComputedProbes:
    """Probes of a device on which a batch needs 1,000 bytes plus 10 bytes for each example.

    Args:
        fresh: Function of size and run that returns a factor of the peak after the first process.
        rows: Number of examples in the data. If None, there is no end.
        isolated: As in `WorkerProbes`.
        first_step: Factor of the peak of the first step.
    """

    def __init__(self, *, fresh=None, rows=None, isolated=True, first_step=None):
        self.isolated = isolated
        self.runs = []
        self.processes = 1
        self._fresh = fresh or (lambda size, run: 1.0)
        self._rows = rows
        self._first_step = first_step
        notes = (Note.of("data_end"),)
        self._facts = WorkloadFacts("CPU:0", LIMIT, True, "float32", 90, 90, None, notes)
        self.fixed, self.each = 1000, 10

    def facts(self):
        return self._facts

    def read(self, size):
        rows = min(size, self._rows or size)
        self.runs.append(rows)
        peak = int(self.fixed + self.each * rows)
        if self.processes > 1:
            peak = int(peak * self._fresh(rows, self.runs.count(rows)))
        if peak > LIMIT:
            return Reading(None, size, 0.5, FreeMemory(400, 500, 300))
        first = self._first_step and int(self._first_step * peak)
        return Reading(peak, rows, 0.5, first_step_bytes=first)

    def renew(self):
        self.processes += 1
        return True


def probe(probes, max_batch_size=None):
    return probe_max_batch(probes, memory_window=(0.8, 0.9), max_batch_size=max_batch_size)


def searched(probes, max_batch_size=None):
    """Search as a plan does: try the largest size first, and do not confirm the answer."""
    experiment = MaxBatchExperiment(probes, (0.8, 0.9), max_batch_size)
    return experiment.largest() or experiment.search(), experiment


def test_first_step_must_fit_below_the_limit_only():
    tried = probe(ComputedProbes(first_step=1.1))
    assert tried.reason.code == "in_window"
    assert tried.peak_memory_bytes == probe(ComputedProbes()).peak_memory_bytes
    greedy = probe(ComputedProbes(first_step=2.0))
    assert all(
        (p.outcome == "fits") == (2 * (1000 + 10 * p.batch_size) <= LIMIT) for p in greedy.probes
    )
    assert 0.4 * LIMIT <= greedy.peak_memory_bytes <= 0.5 * LIMIT


def test_probe_max_batch_confirms_an_answer_in_the_window():
    probes = ComputedProbes()
    result = probe(probes)
    assert result.reason.code == "in_window"
    assert 0.8 * LIMIT <= result.peak_memory_bytes <= 0.9 * LIMIT
    again = [p.purpose for p in result.probes if p.batch_size == result.max_batch_size]
    assert again == ["search", "fresh_process", "mixed_sizes"]
    assert [p.batch_size for p in result.probes] == probes.runs
    assert (result.weights_bytes, result.limit_bytes, result.device) == (90, LIMIT, "CPU:0")
    assert result.noted == (Note.of("data_end"),)
    assert result.environment is not None


def test_largest_fits_and_ends_the_search():
    probes = ComputedProbes()
    answer, experiment = searched(probes, max_batch_size=64)
    assert answer == (64, "it is `max_batch_size`")
    assert [run[0] for run in experiment.runs] == [64]
    assert not experiment.is_bound(64)
    answer, experiment = searched(ComputedProbes(), max_batch_size=5000)
    assert experiment.is_bound(answer[0])


@pytest.mark.parametrize(
    ("cap", "known", "runs"),
    [
        # It is too large, the data has fewer rows, or it could end this process.
        (5000, {}, [5000, 1]),
        (64, {"rows": 20}, [20, 1]),
        (64, {"isolated": False}, [1, 8, 64]),
        (None, {}, [1]),
    ],
)
def test_largest_does_not_fit_and_the_search_follows(cap, known, runs):
    probes = ComputedProbes(**known)
    answer, _ = searched(probes, max_batch_size=cap)
    plain = probe(ComputedProbes(**known), max_batch_size=cap)
    assert probes.runs[: len(runs)] == runs
    assert answer[0] == pytest.approx(plain.max_batch_size, rel=0.01)
    assert answer[1] == plain.reason


def test_largest_fails_with_an_unclear_error():
    class NoAlgorithm(ComputedProbes):
        """A library that finds no algorithm at a large size. It means out of memory."""

        def read(self, size):
            if size > 100 and not self.runs:
                raise RuntimeError("No algorithm worked!")
            return super().read(size) if size <= 100 else Reading(None, size, 0.5)

    probes = NoAlgorithm()
    answer, _ = searched(probes, max_batch_size=5000)
    assert answer[0] <= 100
    assert probes.runs[0] == 1


def test_probe_max_batch_searches_again_if_a_new_process_needs_more():
    probes = ComputedProbes(fresh=lambda size, run: 1.08)
    result = probe(probes)
    first = next(p.batch_size for p in result.probes if p.purpose == "fresh_process")
    assert result.max_batch_size < first
    assert result.peak_memory_bytes <= 0.9 * LIMIT
    last = [p for p in result.probes if p.batch_size == result.max_batch_size]
    assert {"fresh_process", "mixed_sizes"} <= {p.purpose for p in last}


def test_probe_max_batch_rejects_a_size_that_runs_out_after_others():
    first = probe(ComputedProbes()).max_batch_size
    probes = ComputedProbes(fresh=lambda size, run: 2.0 if size == first and run == 3 else 1.0)
    result = probe(probes)
    assert result.max_batch_size < first
    out = [p for p in result.probes if p.outcome == "out_of_memory"]
    assert [(p.batch_size, p.purpose, p.peak_memory_bytes) for p in out] == [
        (first, "mixed_sizes", None)
    ]
    assert (result.requested_block_bytes, result.free_bytes) == (400, 500)
    assert result.largest_free_block_bytes == 300


def test_probe_max_batch_notes_peaks_that_keep_rising():
    # Each run of a size needs 6 % more than the run before.
    result = probe(ComputedProbes(fresh=lambda size, run: 0.94 + 0.06 * run))
    assert "peaks_differ" in [note.code for note in result.notes]
    assert result.max_batch_size in {p.batch_size for p in result.probes}


def test_probe_outcome_above_window_differs_from_out_of_memory():
    probes = ComputedProbes()
    probes.fixed, probes.each = 0, 1900
    result = probe(probes)  # 4 examples need 7600, 5 need 9500.
    assert result.max_batch_size == 4
    assert result.reason.code == "next_above"
    assert "batch size 4 needs 76 % of memory, and 5 needs 95 %" in result.reason
    outcomes = {p.batch_size: p.outcome for p in result.probes}
    assert (outcomes[4], outcomes[5]) == ("fits", "above_window")


@pytest.mark.parametrize("rows", [1, 2, 699])
def test_probe_max_batch_data_with_few_rows(rows):
    probes = ComputedProbes(rows=rows)
    result = probe(probes)
    assert (result.max_batch_size, result.reason.code) == (rows, "reached_data")
    assert set(probes.runs) >= {rows}
    assert max(p.batch_size for p in result.probes) == rows


@pytest.mark.parametrize(("each", "needed"), [(8500, 9500), (20_000, None)])
def test_out_of_memory_error_names_the_bytes_of_one_example(each, needed):
    probes = ComputedProbes()
    probes.each = each
    with pytest.raises(OutOfMemoryError, match="One example does not fit") as caught:
        probe(probes)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (needed, LIMIT)
    assert "90 B" in str(caught.value)
    assert ("9.28 KiB" in str(caught.value)) == (needed is not None)


def test_out_of_memory_error_has_the_output_of_a_dead_worker():
    died = WorkerDied(-11, "Check failed: a crash")

    class Crashes(ComputedProbes):
        def read(self, size):
            return Reading(None, size, 0.5, died=died)

    with pytest.raises(OutOfMemoryError, match="worker process ended with status -11") as caught:
        probe(Crashes())
    assert caught.value.__cause__ is died
    copy = pickle.loads(pickle.dumps(caught.value))
    assert "Check failed: a crash" in copy.__notes__[0]
    assert (str(copy), copy.limit_bytes) == (str(caught.value), LIMIT)


def passed(probes, sizes, *, seconds=(), budget_s=100.0, **changed):
    """Run a pass with 100 bytes for each example, and return records and outcomes."""
    probes.each, clock = 100, iter(seconds)
    changed |= {"clock": lambda: next(clock, 0.0), "say": lambda line: None}
    result = memory_pass(probes, sizes, dtype_policy="float32", time_budget_s=budget_s, **changed)
    return result.records, [record.outcome for record in result.records]


def test_memory_pass_trusts_one_size_only_without_a_worker():
    """One example needs 11 % of the memory and 10 % are fixed, so 64 examples need 74 %."""
    for isolated, outcome in ((True, "fits"), (False, "not_run")):
        assert passed(ComputedProbes(isolated=isolated), (1, 64))[1] == ["fits", outcome]


def test_memory_pass_skips_sizes_expected_above_the_window():
    probes = ComputedProbes()
    records, outcomes = passed(probes, (1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert probes.runs == [1, 2, 4, 8, 16, 32, 64]
    assert outcomes == ["fits"] * 7 + ["not_run"] * 2
    assert records[7].guarded
    assert "90%" in records[7].reason


def test_memory_pass_ends_when_memory_runs_out():
    probes = ComputedProbes(fresh=lambda size, run: 10.0 if size >= 16 else 1.0)
    probes.processes = 2
    records, outcomes = passed(probes, (1, 4, 8, 16, 32))
    assert probes.runs == [1, 4, 8, 16]
    assert outcomes == ["fits"] * 3 + ["out_of_memory", "not_run"]
    assert records[3].peak_bytes is None
    assert records[4].guarded
    assert "ran out at batch size 16" in records[4].reason


def test_memory_pass_ends_when_the_data_ends():
    probes = ComputedProbes(rows=5)
    records, outcomes = passed(probes, (1, 4, 8, 16))
    assert probes.runs == [1, 4, 5]
    assert outcomes == ["fits", "fits", "not_run", "not_run"]
    assert {(r.peak_bytes, r.refusal) for r in records[2:]} == {
        (None, "the data function gave 5 examples")
    }


def test_memory_pass_ends_with_its_time_budget_after_two_sizes():
    for seconds, fit in (((0.0, 2.0, 3.0), 3), ((0.0, 9.0, 9.0), 2)):
        records, outcomes = passed(ComputedProbes(), (1, 2, 4, 8), seconds=seconds, budget_s=2.5)
        assert outcomes == ["fits"] * fit + ["not_run"] * (4 - fit)
        assert not any(record.guarded for record in records)
    probes = ComputedProbes()
    probes.read = lambda size: Reading(100 * size, size, 0.5, later_s=0.1 * size)
    assert passed(probes, (1, 2, 4, 64), budget_s=2.5)[1] == ["fits"] * 3 + ["not_run"]
    records, outcomes = passed(ComputedProbes(), (1, 2, 512), budget_s=-1.0, fewest=1)
    assert outcomes == ["fits", "not_run", "not_run"]
    assert [record.guarded for record in records[1:]] == [False, True]
