"""The result of a search for the largest batch, its table and its figure."""

import numpy as np
import pytest
from figure_studies import max_batch_result
from matplotlib.colors import to_hex

from kbatch.memory.figure import plot_memory
from kbatch.memory.result import ProbeRecord
from kbatch.plotting.canvas import ALARM
from kbatch.records.notes import Note
from kbatch.training.data.training_data import TrainingData

PROBES = (
    ProbeRecord(1, 100, "fits", 2.0),
    ProbeRecord(100, 400, "fits", 1.0),
    ProbeRecord(900, None, "out_of_memory", 0.5),
    ProbeRecord(300, 880, "fits", 1.0),
    ProbeRecord(300, 890, "fits", 3.0, "fresh_process"),
    ProbeRecord(300, 884, "fits", 1.0, "mixed_sizes"),
)


def result(**changed):
    fields = {"max_batch_size": 300, "limit_bytes": 1000, "probes": PROBES}
    return max_batch_result(**(fields | changed))


def test_max_batch_result_predict_uses_the_highest_peaks():
    found = result()
    assert found.memory_bytes == {1: 100, 100: 400, 300: 890}
    assert found.peak_memory_bytes == 890
    assert found.predict(300) == pytest.approx(890, rel=0.05)
    difference = found.predict(250) - found.predict(150)
    assert difference == pytest.approx(100 * found.fit.bytes_per_example, abs=1)  # Rounded.


def test_max_batch_result_predict_at_least_the_measured_peaks():
    larger = ProbeRecord(280, 950, "above_window", 1.0)  # More than size 300 needed.
    found = result(probes=(*PROBES, larger))
    assert [found.predict(size) for size in (280, 285)] == [950, 950]
    lost = ProbeRecord(280, None, "out_of_memory", 1.0)
    assert [result(probes=(*PROBES, lost)).predict(size) for size in (280, 300)] == [1000, 1000]


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("sizes", [(1, 400), (1, 40, 800, 2250), (1, 2, 30, 200, 210)])
def test_max_batch_result_fits_coverage_of_intervals(sizes, noise):
    rng, held, count = np.random.default_rng(0), 0, 40
    for _ in range(count):
        peaks = [int((6e8 + 3e6 * size) * (1 + noise * rng.normal())) for size in sizes]
        probes = [ProbeRecord(*pair, "fits", 1.0) for pair in zip(sizes, peaks, strict=True)]
        fits = result(max_batch_size=1, probes=tuple(probes), memory_window=(0.8, 0.9)).fits
        assert list(fits) == [8, 16, 24, 40, 80, 141]
        true = {size_gb: (0.9e9 * size_gb - 6e8) / 3e6 for size_gb in fits}
        held += sum(one.low <= true[gb] <= one.high + 1 for gb, one in fits.items()) / 6
        assert all(one.low <= one.value <= one.high for one in fits.values())
    assert held / count >= 0.9


def test_max_batch_result_fits_bounded_by_measured_sizes():
    peaks = {size: 8 * 10**9 + 10**7 * size for size in (1, 400, 639, 1361, 2000)}
    probes = tuple(ProbeRecord(size, peak, "fits", 1.0) for size, peak in peaks.items())
    found = result(probes=probes, max_batch_size=639, memory_window=(0.8, 0.9))
    assert found.fits[8].value == found.fits[8].high == 0
    assert found.fits[16].low >= 639 and found.fits[24].high < 1361
    assert found.use.count("GB") == 6 and f"24 GB: {found.fits[24].value:,} (" in found.use
    flat = tuple(ProbeRecord(size, 10**9, "fits", 1.0) for size in (1, 9))
    for probes in (flat, flat[:1]):
        found = result(probes=probes, max_batch_size=1)
        assert (found.fits, found.use) == ({}, "")


def test_max_batch_result_powers_of_two():
    assert result().powers_of_two(16) == (16, 32, 64, 128, 256)
    assert result().powers_of_two()[0] == 1


def test_max_batch_result_note_at_the_end_of_the_data():
    assert not any(result(reason=Note.of(code)).notes for code in ("reached_most", "in_window"))
    (note,) = result(reason=Note.of("reached_data")).notes
    rows = np.ones((5, 3))
    examples = [p.removeprefix("longest_example=") for p in note.split("`") if "y[0])" in p]
    for x, example in zip((rows, {"a": rows, "b": rows}), examples, strict=True):
        TrainingData.of_example(eval(example, {"x": x, "y": np.ones(5)})).check()


def test_max_batch_result_table():
    table = result().table()
    assert table["batch size"].tolist() == [1, 100, 900, 300, 300, 300]
    assert table["of the limit (%)"].tolist()[3:] == [88.0, 89.0, 88.4]
    assert table["peak memory (MiB)"][3] == 880 / 2**20
    assert table["outcome"][2] == "out of memory"
    assert table.attrs["answer"] == [3, 4, 5]


GIB = 2**30


def test_plot_memory_draws_every_run():
    result = max_batch_result()
    panel = plot_memory(result)
    lines = {line.get_label(): line for line in panel.lines}
    kinds = ("fits", "above the window", "run once more to confirm")
    ran = [lines[kind] for kind in kinds]
    drawn = {place for line in ran for place in zip(*line.get_data(), strict=True)}
    runs = [probe for probe in result.probes if probe.peak_memory_bytes]
    assert drawn == {(probe.batch_size, probe.peak_memory_bytes / GIB) for probe in runs}
    failed = lines["out of memory"]
    assert (list(failed.get_xdata()), list(failed.get_ydata())) == ([4000], [8.0])
    assert to_hex(failed.get_color()) == ALARM
    (window,) = panel.patches
    assert (window.get_y(), window.get_height()) == pytest.approx((0.8 * 8, 0.1 * 8))
    assert [sorted(line.get_xdata()) for line in ran] == [[1, 40, 800, 2250], [2600], [2250]]
    assert len({lines[label].get_marker() for label in lines if not label.startswith("_")}) == 4


def test_plot_memory_one_size_in_mebibytes():
    probes = (ProbeRecord(1, 300 * 2**20, "fits", 1.0),)
    limit = 512 * 2**20
    panel = plot_memory(max_batch_result(probes=probes, max_batch_size=1, limit_bytes=limit))
    assert panel.get_ylabel() == "Peak memory (MiB)"
    assert panel.get_ylim() == pytest.approx((0, 512 * 1.12))
    assert not [line for line in panel.lines if len(line.get_xdata()) == 100]
    assert "fitted" not in panel.get_label()
