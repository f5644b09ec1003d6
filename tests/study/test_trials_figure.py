import math
import re
import subprocess
import sys

import pytest
from figure_samples import two_panels, words
from matplotlib.colors import to_hex
from records_factory import make_epochs, make_execution, make_search, make_study, make_trial

import kbatch
from kbatch.plotting.canvas import ALARM, PAPER, save_figure
from kbatch.study.figures.quality import learning_curves, pareto_points
from kbatch.study.figures.trials import draw_trials, plot_trials
from kbatch.study.trial import Objective


def panels(study):
    return two_panels(plot_trials(study))


def test_plot_trials_draws_completed_trials():
    completed = make_study().trials[:-1]
    values = [t.samples_per_second for t in completed], [t.judged_value for t in completed]
    for panel, shown in zip(panels(make_study()), values, strict=True):
        series = next(line for line in panel.lines if len(line.get_xdata()) == 6)
        assert list(series.get_xdata()) == [16, 32, 64, 128, 256, 512]
        assert list(series.get_ydata()) == pytest.approx(list(shown))


def searched(values):
    """A study with a trial for each size and learning-rate factor."""
    trials = []
    for (size, factor), value in values.items():
        own = {"trial_id": f"{size}-{factor}", "learning_rate": 0.001 * factor}
        own["hyperparameters"] = {"learning_rate_factor": factor}
        trials.append(make_trial(size, accuracies=(value,), **own))
    return make_study(*trials)


def test_plot_trials_joins_best_rate_of_each_size():
    study = searched({(16, 1.0): 0.94, (16, 4.0): 0.95, (32, 1.0): 0.93, (32, 4.0): 0.1})
    upper, lower = panels(study)
    lines = [line for line in lower.lines if list(line.get_xdata()) == [16, 32]]
    joined = [list(line.get_ydata()) for line in lines if line.get_linestyle() == "-"]
    assert joined == [[0.95, 0.93]]
    (others,) = [line for line in lower.lines if line.get_marker() == "."]
    assert list(others.get_ydata()) == [0.94]
    assert not others.get_clip_on()  # A mark at the edge is not cut.
    assert "." in [line.get_marker() for line in upper.lines]
    assert "take batch size 16, learning rate 0.004: 0.9500" in words(lower)
    # The axis does not include the worst value.
    assert lower.get_ylim()[0] > 0.5
    assert "Grey: 2 other trials, 1 outside the plot" in words(lower)


def test_plot_trials_names_size_outside_axis():
    trials = []
    for size, loss in {16: 0.2, 32: 0.25, 64: 0.22, 128: 5000.0}.items():
        runs = [make_execution(size, accuracies=(1.1 - loss * f,)) for f in (0.9, 1, 1.1)]
        trials.append(make_trial(size, *runs, objective=Objective("val_loss", "min")))
    _, lower = panels(make_study(*trials))
    least, most = lower.get_ylim()
    assert most < 1
    for trial in trials[:3]:  # Their bars are not cut.
        low, high = trial.metric("val_loss").ends
        assert least < low < high < most
    assert "batch size 128 (5,000)" in words(lower)


def test_draw_trials_running_trial_is_hollow():
    upper = draw_trials([make_study()], None, running="0032")
    hollow = [line for line in upper.lines if line.get_markerfacecolor() == PAPER]
    assert [list(line.get_xdata()) for line in hollow] == [[32]]


@pytest.mark.filterwarnings("error")
def test_draw_trials_short_runs_are_hollow():
    runs = [make_execution(32, accuracies=(v,), length="short") for v in (0.7, 0.86, 0.92)]
    short = [make_trial(32, run, trial_id=f"{number}") for number, run in enumerate(runs)]
    upper, lower = panels(make_study(*short))
    hollow = [line for line in lower.lines if line.get_markerfacecolor() == PAPER]
    assert [line.get_ydata()[0] for line in hollow] == [0.7, 0.86, 0.92]
    assert lower.get_ylim()[0] < 0.7 < 0.92 < lower.get_ylim()[1]
    assert "Hollow: short runs." in words(lower)
    upper.figure.draw_without_rendering()
    text = words(panels(make_study(*short, make_trial(64)))[1])
    assert "3 short (hollow)" in text and "No complete run: batch size 32." in text


def test_figures_leave_out_size_at_far_rate():
    """A race compared 32 and 64 four times, and tried 128 only at a 16th of their rate."""
    trials = []
    for size, value, count, factor in ((32, 0.9, 4, 4.0), (64, 0.9, 4, 4.0), (128, 0.3, 1, 0.25)):
        runs = [make_execution(size, accuracies=(value,), seed=seed) for seed in range(count)]
        trials.append(make_trial(size, *runs, hyperparameters={"learning_rate_factor": factor}))
    search = make_search(strategy="race", batch_sizes=[32, 64, 128])
    study = make_study(*trials, search=search)
    for panel in panels(study):
        joined = [line for line in panel.lines if line.get_linestyle() == "-"]
        assert [list(line.get_xdata()) for line in joined] == [[32, 64]]
        hollow = [line for line in panel.lines if line.get_markerfacecolor() == PAPER]
        assert [list(line.get_xdata()) for line in hollow] == [[128]]
    assert "Hollow: trained only at a learning rate far from the best one." in words(panel)
    # Its quality would take up the other figures.
    assert {point[0].batch_size for point in pareto_points(study)[1]} == {32, 64}
    assert [trial.batch_size for trial, _ in learning_curves(study)[1]] == [32, 64]
    for plot in (kbatch.plot_pareto, kbatch.plot_learning_curves):
        shown = " ".join(map(words, plot(study).figure.axes))
        assert "Left out: batch size 128, trained only at" in shown


def test_plot_trials_marks_failed_trial_at_bottom():
    ended = {32: "completed", 64: "failed", 128: "out_of_memory"}
    study = make_study(*(make_trial(size, status=status) for size, status in ended.items()))
    upper, lower = panels(study)
    for panel in (upper, lower):
        (crosses,) = [line for line in panel.lines if line.get_marker() == "X"]
        assert list(zip(*crosses.get_data(), strict=True)) == [(64, 0), (128, 0)]
        assert to_hex(crosses.get_color()) == ALARM
        assert crosses.get_transform() == panel.get_xaxis_transform()
    assert "failed" in words(lower)
    assert "out of memory" in words(lower)


@pytest.mark.filterwarnings("error")
def test_plot_trials_metric_always_nan():
    nan = make_execution(epochs=make_epochs((math.nan,)))
    upper, lower = panels(make_study(make_trial(64, nan, nan, nan)))
    assert "n/a (not measured in any trial)" in words(lower)
    upper.figure.draw_without_rendering()


def test_plot_trials_in_notebook_uses_pyplot(tmp_path):
    code = (
        "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel');"
        "sys.path.insert(0, 'tests');"
        "import kbatch, matplotlib; matplotlib.use('agg'); from matplotlib import pyplot;"
        "from records_factory import make_study, make_trial;"
        "study = make_study(make_trial(64, accuracies=(0.9,)));"
        "ax = kbatch.plot_trials(study); assert pyplot.gcf() is ax.figure;"
        "pyplot.close('all');"
        "kbatch.write_report(study, sys.argv[1]); assert pyplot.get_fignums() == []"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r.html")], check=True)


def test_save_figure_pdf(tmp_path):
    axes = plot_trials(make_study(make_trial(64)))
    save_figure(axes, tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/Subtype /Type3" not in content
    assert re.search(rb"/FontFile2|/CIDFontType2|/ObjStm", content)
    assert b"CreationDate" not in content
    with pytest.raises(ValueError, match=r"`\.png`, `\.svg` or `\.pdf`.*'\.bmp'"):
        save_figure(axes, tmp_path / "trials.bmp")
