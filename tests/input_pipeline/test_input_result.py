import dataclasses

import numpy as np
import pytest
from figure_samples import words
from input_profile_factory import make_change, make_long_run, make_profile, make_rate
from matplotlib.colors import to_hex

from kbatch.input_pipeline.figure import plot_input_pipeline
from kbatch.input_pipeline.result import RateRecord
from kbatch.plotting.canvas import ALARM, series_style
from kbatch.records.notes import Note


def test_profile_without_rounds():
    rate = RateRecord((), ())
    assert (rate.samples_per_second, rate.wait_share) == (None, None)
    empty = dataclasses.replace(make_profile(), pipeline=rate, step=rate, together=rate, changes=())
    assert (empty.verdict, empty.ratio) == ("undetermined", None)
    assert empty.table()["samples/s"][:3].isna().all()
    assert empty.answer


CHANGES = (
    make_change("prefetch", 1.0),
    make_change("any order", 0.7),
    make_change("parallel_map", 1.9, condition=Note.of("called_by_threads")),
    make_change("cache", 2.5),
    make_change("thread pool", 1.04),
    make_change("more_workers", None),
)


def test_table_orders_changes_and_claims_only_clear_gains():
    profile = make_profile(changes=CHANGES)
    table = profile.table()
    assert list(table["outcome"][-6:].items()) == [
        ("cache", "clear gain"),
        ("parallel map", "clear gain"),
        ("thread pool", "no clear gain"),
        ("prefetch", "no clear gain"),
        ("any order", "1.43 times slower"),
        ("more workers", "not tried: trying all takes about 9 s, above half of `time_budget_s`"),
    ]
    gain = table.loc["parallel map"]
    ends = ["times as fast", "times as fast, low", "times as fast, high"]
    assert list(gain[ends]) == pytest.approx([1.9] * 3)
    assert gain["condition"].startswith("several threads")
    assert table.attrs["answer"] == ["cache"]
    assert "with cache training is 2.50 (2.50 to 2.50) times as fast" in profile.answer
    assert make_profile(changes=CHANGES[:2]).table().attrs["answer"] == []


def test_table_speeds_agree_with_the_printed_ratios():
    rng = np.random.default_rng(0)

    def noisy(rate, rounds):  # The machine drifts, and a pause makes one round slow.
        drift = np.exp(0.3 * rng.normal(size=rounds))
        drift[0] /= 100
        rates = rate * drift
        return RateRecord((640,) * rounds, tuple((640 / rates).tolist()), (0.001,) * rounds)

    change = dataclasses.replace(make_change(), original=noisy(200, 9), changed=noisy(330, 9))
    rates = {"pipeline": noisy(700, 9), "step": noisy(2400, 9), "together": noisy(375, 9)}
    profile = dataclasses.replace(make_profile(changes=(change,)), **rates)
    pipeline, step, together, changed = profile.table()["samples/s"]
    assert changed / together == pytest.approx(profile.changes[0].gain.value)
    assert pipeline / step == pytest.approx(profile.ratio.value)
    _, lower = panels(profile)
    widths = [bar.get_width() for bar in lower.patches]
    assert widths[:3] == pytest.approx([pipeline, step, together])


def test_table_marks_no_change_if_training_hardly_waits():
    profile = make_profile(pipeline=2400, step=800, changes=CHANGES)
    assert profile.table().attrs["answer"] == []


def make_disturbed_step(rates=(449, 2550, 2400, 11_700, 2700)):
    """A train step alone that another program slowed in most rounds."""
    return RateRecord((640,) * len(rates), tuple(640 / rate for rate in rates))


@pytest.mark.parametrize(
    ("changed", "disturbed"),
    [
        # Measured on a busy machine. The pipeline alone was faster in every round.
        ({"pipeline": 100_000, "step": make_disturbed_step(), "together": 9610}, ("step",)),
        ({"pipeline": 2400, "step": 800, "together": 900}, ("step",)),
        ({"pipeline": 800, "step": 2400, "together": 900}, ("pipeline",)),
        ({"pipeline": 2400, "step": 800, "together": 2700}, ("step", "pipeline")),
        ({"pipeline": 2400, "step": 800, "together": 830}, ()),
        ({"pipeline": 800, "step": 2400, "together": 830}, ()),
    ],
)
def test_verdict_of_a_disturbed_measurement(changed, disturbed):
    profile = make_profile(
        **{n: rate if isinstance(rate, int) else 800 for n, rate in changed.items()}
    )
    if isinstance(changed["step"], RateRecord):
        profile = dataclasses.replace(profile, step=changed["step"])
    assert profile.disturbed == disturbed
    assert (profile.verdict == "undetermined") == bool(disturbed)


def test_disturbed_needs_comparable_batches():
    faster = {"pipeline": 800, "step": 2400, "together": 1600}
    assert make_profile(**faster).verdict == "undetermined"
    no_overlap = make_profile(pipeline=1000, step=1000, together=500)
    assert "within 5 %, but training waits for data" in no_overlap.answer
    # Training may end before a pause of the pipeline that a long reading counts.
    assert make_profile(**faster, long_run=make_long_run(800)).verdict == "input-bound"
    # The batches of the rounds may be smaller than the batches of the reading.
    assert make_profile(**faster, together_comparable=False).verdict == "input-bound"


def panels(profile, ax=None):
    upper = plot_input_pipeline(profile, ax)
    (lower,) = [a for a in upper.figure.axes if a is not upper]
    return upper, lower


def extents(bars):
    return np.array([path.get_extents().intervalx for path in bars.get_paths()])


def test_plot_timeline():
    upper, lower = panels(make_profile())
    computing, waiting = map(extents, upper.collections)
    assert len(waiting) == 13
    np.testing.assert_allclose(waiting[:, 1], computing[:, 0])
    np.testing.assert_allclose(np.ptp(waiting, axis=1), 50)
    np.testing.assert_allclose(np.ptp(computing, axis=1), 30)
    colors = [to_hex(bars.get_facecolor()[0]) for bars in upper.collections]
    assert colors == [series_style(0)[0], ALARM]
    assert "input-bound" in upper.get_title(loc="left")
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("Time (ms)", "Throughput (samples/s)")
    for part in ("waiting for data (66 %)", "computing", "CPU, 16 cores", "5 rounds", "float32"):
        assert part in words(upper)


def test_plot_bars():
    changes = tuple(make_change(f"change {g}", g) for g in (1.0, 3.0, 1.5, 2.0, 2.5, 0.5))
    _, lower = panels(make_profile(changes=changes))
    assert [tick.get_text() for tick in lower.get_yticklabels()] == [
        *("pipeline alone", "train step alone", "both together"),
        *("with change 3.0", "with change 2.5", "with change 2.0"),
    ]
    assert [bar.get_width() for bar in lower.patches][:2] == pytest.approx([800, 2400])
    assert len({bar.get_facecolor() for bar in lower.patches}) == 4
    for bar, interval in zip(lower.patches, lower.collections, strict=True):
        low, high = extents(interval)[0]
        assert low <= bar.get_width() <= high
    few = {name: make_rate(800, rounds=2) for name in ("pipeline", "step", "together")}
    _, lower = panels(dataclasses.replace(make_profile(changes=()), **few))
    assert (len(lower.patches), len(lower.collections)) == (3, 0)
