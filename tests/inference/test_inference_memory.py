"""The ascent with probes that tell what a test wants."""

import types

from kbatch.memory.find import memory_pass
from kbatch.memory.workload import Reading

LIMIT = 1000


class Probes:
    """Memory of 100 bytes and some bytes an example; it runs out above the limit."""

    isolated = True

    def __init__(self, each=10, hidden_from=None, rows=10**6):
        self.each, self.rows = each, rows
        self.hidden_from = hidden_from
        self.sizes = []

    def read(self, batch_size):
        self.sizes.append(batch_size)
        each = self.each
        if self.hidden_from is not None and batch_size >= self.hidden_from:
            each *= 10
        peak = 100 + each * batch_size
        return Reading(peak if peak <= LIMIT else None, min(batch_size, self.rows), 0.1)

    def facts(self):
        return types.SimpleNamespace(limit_bytes=LIMIT, held_bytes=50, notes=())

    def renew(self):
        return True


def ascend(probes, sizes, **changed):
    arguments = {
        "dtype_policy": "float32",
        "time_budget_s": 100.0,
        "clock": lambda: 0.0,
        "say": lambda line: None,
    }
    return memory_pass(probes, sizes, **(arguments | changed)).records


def test_a_single_size_refuses_no_other_one_where_a_worker_runs_out():
    """Of the 150 bytes of one example 100 are there whatever the batch: 256 need 356."""
    probes = Probes(each=1)
    records = ascend(probes, (1, 256))
    assert [(r.batch_size, r.outcome) for r in records] == [(1, "fits"), (256, "fits")]
    probes.isolated = False
    assert [r.outcome for r in ascend(probes, (1, 256))] == ["fits", "not_run"]


def test_what_is_expected_above_the_window_is_not_run():
    probes = Probes()
    records = ascend(probes, (1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert probes.sizes == [1, 2, 4, 8, 16, 32, 64]
    assert [r.outcome for r in records] == ["fits"] * 7 + ["not_run"] * 2
    assert records[7].guarded
    assert "90%" in records[7].reason


def test_memory_that_runs_out_is_a_result_and_nothing_larger_is_run():
    probes = Probes(hidden_from=16)
    records = ascend(probes, (1, 4, 8, 16, 32))
    assert probes.sizes == [1, 4, 8, 16]
    assert [r.outcome for r in records] == ["fits"] * 3 + ["out_of_memory", "not_run"]
    assert records[3].peak_bytes is None
    assert records[4].guarded
    assert "ran out at batch size 16" in records[4].reason


def test_sizes_that_a_data_function_does_not_fill_have_no_memory():
    probes = Probes(each=1, rows=5)
    records = ascend(probes, (1, 4, 8, 16))
    assert probes.sizes == [1, 4, 8]
    assert [(r.outcome, r.peak_bytes) for r in records[2:]] == [("not_run", None)] * 2
    assert {r.refusal for r in records[2:]} == {"the data function gave 5 examples"}


def test_the_time_ends_it_after_two_sizes_without_calling_the_rest_too_large():
    seconds = iter([0.0, 2.0, 3.0])
    records = ascend(Probes(), (1, 2, 4, 8), time_budget_s=2.5, clock=lambda: next(seconds))
    assert [r.outcome for r in records] == ["fits", "fits", "fits", "not_run"]
    assert not any(r.guarded for r in records)
    seconds = iter([0.0, 9.0, 9.0])
    records = ascend(Probes(), (1, 2, 4, 8), time_budget_s=2.5, clock=lambda: next(seconds))
    assert [r.outcome for r in records] == ["fits", "fits", "not_run", "not_run"]
