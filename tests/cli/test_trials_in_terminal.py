"""The table of trials in terminals of several widths."""

import io

import pytest
from records_factory import make_study, make_trial
from rich.console import Console

from kbatch.cli.study import print_trials


def printed(width, *trials):
    out = io.StringIO()
    print_trials(make_study(*trials), Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_title_and_no_number_is_cut(width):
    found = printed(width)
    assert "…" not in found
    table = found.split("in the report too")[0].split("in every trial")[0]
    assert max(map(len, table.splitlines())) <= width
    for word in ("Batch", "Micro-batch", "Samples/s", "14,900"):
        assert word in found


def test_what_a_narrow_terminal_leaves_out_is_named():
    assert "in the report too: " not in printed(200)
    assert "in the report too: " in printed(60)
    assert " (" in printed(200).split("in every trial")[0]


def test_a_text_keeps_its_brackets_where_spreads_go():
    """Without them sizes that trained with different layers would seem to have the same one."""
    kinds = {16: "relu (leaky)", 64: "relu (plain)"}
    trials = (
        make_trial(size, hyperparameters={"kind": kind}, accuracies=(size / 99,), rate=10.0 * size)
        for size, kind in kinds.items()
    )
    found = printed(60, *trials)
    assert all(kind in found for kind in kinds.values())
    assert "kind relu" not in found
