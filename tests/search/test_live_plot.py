"""The live figure: in place, through copies of callbacks, and in a notebook's cleared output."""

import base64
import copy
import dataclasses

import pytest
import searches
from fake_clock import FakeClock
from figure_studies import learning
from records_factory import make_execution, make_study, make_trial

import kbatch
from kbatch.search.progress import draw_live

CELL = """
import sys
sys.path[:0] = {path}
import searches, keras_tuner, kbatch
hypermodel = searches.stock(batch_sizes=(8, 16))
live = kbatch.LivePlot(interval_s=0)
fit = dict(callbacks=[live], verbose=1)
searches.search({folder!r}, hypermodel, keras_tuner.GridSearch, fit=fit)
"""


class Screen:
    """Shows bundles as IPython's `display` does, and remembers what stands where."""

    def __init__(self):
        self.places = []
        self.changes = 0

    def __call__(self, data, *, raw, metadata=None, display_id):
        assert raw and display_id
        self.places.append(data)
        return Place(self, len(self.places) - 1)

    @property
    def pictures(self):
        return [data for data in self.places if "image/png" in data]


class Place:
    def __init__(self, screen, number):
        self.screen, self.number = screen, number

    def update(self, data, *, raw, metadata=None):
        self.screen.changes += 1
        self.screen.places[self.number] = data


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search of kbatch's tuner with a live plot: the screen, and the file it wrote."""
    folder, screen = tmp_path_factory.mktemp("live"), Screen()
    live = kbatch.LivePlot(folder / "live.svg", interval_s=0, display=screen, now=FakeClock())
    searches.search(
        folder,
        searches.stock(batch_sizes=(8, 16)),
        kbatch.BatchSizeTuner,
        fit={"callbacks": [live]},
    )
    return screen, folder / "live.svg"


def test_a_search_has_one_figure_that_changes_in_place(searched):
    screen, _ = searched
    assert len(screen.places) == 1
    # Of two trials the begin, the epoch within, the end of training and that of the trial.
    assert screen.changes == 2 * 4 - 1
    picture = base64.b64decode(screen.pictures[0]["image/png"])
    assert picture.startswith(b"\x89PNG")
    assert "2 trials ended" in screen.pictures[0]["text/plain"]


def test_under_a_stock_tuner_each_trial_has_a_new_place_and_the_old_one_is_empty(tmp_path):
    screen = Screen()
    live = kbatch.LivePlot(interval_s=0, display=screen, now=FakeClock(tick_s=1.0))
    searches.quick(tmp_path, searches.stock(batch_sizes=(8, 16)), fit={"callbacks": [live]})
    assert len(screen.places) == 2
    assert screen.places[0] == {"text/plain": ""}
    assert len(screen.pictures) == 1


def test_a_copy_shows_in_the_same_place(searched):
    live = kbatch.LivePlot(display=(screen := Screen()))
    for one in (copy.deepcopy(live), live):
        one.show_ended(searched[1].parent / "search")
    assert (len(screen.places), screen.changes) == (1, 1)


def test_drawing_waits_so_that_it_takes_a_tenth_of_the_time(searched, tmp_path):
    screen = Screen()
    # Each look at the clock is a second: a drawing takes one, so ten pass until the next.
    live = kbatch.LivePlot(display=screen, interval_s=0, now=FakeClock(tick_s=1.0))
    live.show_ended(searched[1].parent / "search")
    drawn = screen.changes + len(screen.places)
    for epoch in range(1, 9):
        live.on_epoch_begin(epoch)
    assert screen.changes + len(screen.places) == drawn


@pytest.mark.slow
def test_in_a_notebook_one_figure_is_left(tmp_path):
    """keras-tuner clears the output of the cell after each trial, the last one included."""
    import sys

    import nbclient
    import nbformat

    source = CELL.format(path=sys.path, folder=str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    outputs = [o for o in notebook.cells[0].outputs if o.output_type == "display_data"]
    pictures = [o for o in outputs if "image/png" in o.data]
    assert len(pictures) == 1
    assert "2 trials ended" in pictures[0].data["text/plain"]


def running(batch_size, epochs=(), **changed):
    """A trial that runs, with so many of its epochs."""
    execution = make_execution(batch_size, status="running", failure=None)
    windows = {"window_examples": (100,), "window_durations_s": (0.1,)} if epochs else {}
    return make_trial(
        batch_size, dataclasses.replace(execution, epochs=tuple(epochs), **windows), **changed
    )


def hollow(axes):
    return [
        (panel, line.get_xdata()[0], line.get_ydata()[0])
        for panel in axes.figure.axes
        for line in panel.lines
        if line.get_markerfacecolor() == "#ffffff"
    ]


def test_the_running_trial_is_hollow_in_both_panels():
    epochs = learning(64)[:3]
    study = make_study(make_trial(16), make_trial(32), running(64, epochs))
    axes = draw_live(study, running="0064", status="2 ended")
    upper, lower = axes.figure.axes
    best = max(epoch.metrics["val_accuracy"] for epoch in epochs)
    assert hollow(axes) == [(upper, 64, pytest.approx(1000)), (lower, 64, pytest.approx(best))]
    assert axes.get_title(loc="left") == "digits: 2 ended"


def test_before_the_first_epoch_it_says_so():
    axes = draw_live(make_study(running(16)), running="0016", status="0 ended")
    assert "No epoch has ended yet." in [text.get_text() for text in axes.texts]
