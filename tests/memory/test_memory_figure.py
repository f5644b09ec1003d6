import pytest
from figure_studies import max_batch_result
from matplotlib.colors import to_hex

from kbatch.memory.figure import plot_memory
from kbatch.memory.result import ProbeRecord
from kbatch.plotting.canvas import ALARM

GIB = 2**30


def test_every_run_is_drawn_and_what_ran_out_lies_on_the_limit():
    result = max_batch_result()
    panel = plot_memory(result)
    lines = {line.get_label(): line for line in panel.lines}
    drawn = {
        (x, y)
        for label in ("below the limit", "above the window", "run once more to confirm")
        for x, y in zip(lines[label].get_xdata(), lines[label].get_ydata(), strict=True)
    }
    expected = {
        (p.batch_size, p.peak_memory_bytes / GIB) for p in result.probes if p.peak_memory_bytes
    }
    assert drawn == expected
    failed = lines["out of memory"]
    assert (list(failed.get_xdata()), list(failed.get_ydata())) == ([4000], [8.0])
    assert to_hex(failed.get_color()) == ALARM
    (window,) = panel.patches
    assert (window.get_y(), window.get_height()) == pytest.approx((0.8 * 8, 0.1 * 8))
    sizes = {label: sorted(lines[label].get_xdata()) for label in lines if label[0] != "_"}
    assert sizes == {
        "below the limit": [1, 40, 800, 2250],
        "above the window": [2600],
        "run once more to confirm": [2250],
        "out of memory": [4000],
    }
    assert len({lines[label].get_marker() for label in lines if not label.startswith("_")}) == 4


def test_a_small_limit_is_in_mebibytes_and_one_size_has_no_line():
    probes = (ProbeRecord(1, 300 * 2**20, "fits", 1.0),)
    limit = 512 * 2**20
    panel = plot_memory(max_batch_result(probes=probes, max_batch_size=1, limit_bytes=limit))
    assert panel.get_ylabel() == "Peak memory (MiB)"
    assert panel.get_ylim() == pytest.approx((0, 512 * 1.12))
    assert not [line for line in panel.lines if len(line.get_xdata()) == 200]
    assert "fitted" not in panel.get_label()
