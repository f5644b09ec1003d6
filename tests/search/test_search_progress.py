"""The output of a search in a terminal, in a notebook and in the live figure."""

import base64
import contextlib
import functools
import io
import re
import time

import keras
import pytest
import records_factory
import searches
from fake_clock import FakeClock
from rich.console import Console

import kbatch
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.progress import ConsoleLine, NotebookLine
from kbatch.search.search_progress import FitReporter, SearchProgress


def progress(share=0.25):
    metrics = {"loss": 0.5, "val_accuracy": 0.91, "samples_per_second": 8123.4}
    return {"share": share, "metrics": metrics}


class Keeps:
    """A line that records its calls."""

    changes = True

    def __init__(self):
        self.lines, self.live = [], []

    def update(self, name, share, figures):
        self.live.append(figures)

    def print(self, text):
        self.lines.append(text)

    def close(self):
        self.live.append(None)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def line():
    return Keeps()


@pytest.fixture
def shown(clock, line):

    def search_left_s():
        return 200.0 if clock.now_s > 150 else None

    with SearchProgress(1, open_line=lambda: line, now=clock, search_left_s=search_left_s) as shown:
        yield shown


def test_live_line_shows_time_left_and_last_metrics(shown, clock, line):
    shown.trial_begins({"batch_size": 64}, total=3)
    clock.now_s = 100.0  # Building and tracing say nothing about the epochs.
    shown.show(**progress(share=0.05))
    clock.now_s = 110.0
    shown.show(**progress(share=0.25))
    figures = "8,123 samples/s, val_accuracy 0.9100"
    assert line.live[-2:] == [f"5 %, {figures}", f"25 %, 38 s left, {figures}"]
    # The time left of the search is the forecast at the start of the trial, minus the time since.
    clock.now_s = 160.0
    shown.trial_ends(records_factory.make_study().trials[0])
    shown.trial_begins({"batch_size": 64}, total=3)
    clock.now_s = 180.0
    shown.show(**progress(share=0.05))
    assert line.live[-1].startswith("5 %, search 3 min left")
    clock.now_s = 190.0
    shown.show(**progress(share=0.25))
    assert line.live[-1].startswith("25 %, 38 s left, search 2.8 min left, 8,123")


def test_show_writes_small_losses_with_digits(shown, line):
    shown.trial_begins({"batch_size": 64}, total=3)
    shown.show(0.5, {"val_loss": 0.0000123, "val_mae": 0.0})
    assert line.live[-1] == "50 %, val_loss 1.23e-05, val_mae 0.0000"


def test_trial_ends_without_a_learning_rate_shows_its_factor(clock):
    line = Keeps()
    line.changes = False
    tried = {"hyperparameters": {FACTOR_NAME: 4.0}, "learning_rate": None}
    planned = records_factory.make_trial(32, **tried)
    for total, left_s in ((3, 42.3), (None, 42.3), (None, 0.4), (1, 42.3)):
        asked = functools.partial(float, left_s)
        with SearchProgress(1, open_line=lambda: line, now=clock, search_left_s=asked) as shown:
            shown.trial_begins({"batch_size": 32}, total=total)
            clock.now_s += 20.0
            shown.trial_ends(planned)
    assert line.lines[0].endswith("; about 42 s left")
    assert line.lines[1].endswith("; about 42 s left, or less")  # Of a race.
    assert " left" not in line.lines[2]
    assert " left" not in line.lines[3]  # It was the last trial, however long the budget is.
    assert ", learning rate 4 times your scaled rate, " in line.lines[0]


def test_fit_reporter_shows_the_share_of_the_trial(shown, line):
    reporter = FitReporter(shown, execution=1, executions=2)
    reporter.set_params({"epochs": 2, "steps": 10})
    for epoch in range(2):
        reporter.on_epoch_begin(epoch)
        for step in range(10):
            reporter.on_train_batch_end(step)
        reporter.on_epoch_end(epoch, {"loss": 0.5})
    shares = [figures.split(" %")[0] for figures in line.live]
    assert shares[:2] + shares[-1:] == ["52", "75", "100"]
    assert len(shares) < 20  # Not each step.


def test_console_line_keeps_lines_and_removes_the_bar():
    out = io.StringIO()
    line = ConsoleLine(Console(file=out, force_terminal=True, width=100))
    line.update("trial 1", 0.5, "50 %, [bold] 30 s left")
    line.print("trial 1 [bold] ended :x:")
    line.close()
    text = out.getvalue()
    assert "50 %, [bold] 30 s left" in text
    assert "trial 1 [bold] ended :x:\n" in text
    assert text.endswith("\x1b[2K")


class Screen:
    """Shows bundles like IPython's `display`, and records the content of each output."""

    def __init__(self):
        self.places = []
        self.changes = 0

    def __call__(self, data, *, raw, metadata=None, display_id):
        assert raw and display_id
        self.places.append(data)
        return Place(self, len(self.places) - 1)

    @property
    def texts(self):
        return [data["text/plain"] for data in self.places]

    @property
    def pictures(self):
        return [data for data in self.places if "image/png" in data]


class Place:
    def __init__(self, screen, number):
        self.screen, self.number = screen, number

    def update(self, data, *, raw, metadata=None):
        self.screen.changes += 1
        self.screen.places[self.number] = data


def test_notebook_line_changes_its_own_output_only(capsys):
    display = Screen()
    display({"text/plain": "the user's table"}, raw=True, display_id=True)
    line = NotebookLine(display)
    line.update("trial 1", 0.2, "20 %")
    line.update("trial 1", 0.5, "50 %")
    assert display.texts == ["the user's table", f"trial 1 {10 * '━'}{10 * '·'}: 50 %"]
    line.print("trial 1 ended")
    line.update("trial 2", 0.5, "50 %")
    line.close()
    assert display.texts == ["the user's table", "trial 1 ended"]
    line.print("of the next search")
    assert display.texts[2:] == ["of the next search"]
    assert capsys.readouterr().out == ""


def test_search_prints_one_line_per_trial_or_nothing(tmp_path):
    hypermodel, seen = searches.stock(batch_sizes=(8, 32)), []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: seen.append(kbatch.load_study(tmp_path / "1" / "search"))
    )
    for verbose, lines in ((1, 3), (0, 0)):
        fit = {"verbose": verbose, "callbacks": [look] * verbose}
        with contextlib.redirect_stdout(out := io.StringIO()):
            tuner = searches.quick(
                tmp_path / str(verbose), hypermodel, kbatch.BatchSizeTuner, fit=fit
            )
        begins = [line.split(",")[0] for line in out.getvalue().splitlines()]
        assert begins == ["Plan: 2 batch sizes", "trial 1/2", "trial 2/2"][:lines]
        assert out.getvalue().count(", learning rate 0.0") == (2 if lines else 0)
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", out.getvalue())
        for run in (run for trial in tuner.study.trials for run in trial.executions):
            ((began_at, train_s, all_s),) = run.spans
            assert tuner.study.plan.began_at <= began_at <= time.time() - all_s
            assert (train_s, all_s) == pytest.approx((run.train_s, run.total_s))
    # Another process reads the progress in the meantime.
    assert [study.trials[-1].status for study in seen] == ["running"] * 2
    starts = [f"Running: {ended} of at most 2 complete trainings" for ended in (0, 1)]
    assert all(map(str.startswith, map(str, seen), starts))
    assert "So far: train with batch size 8" in seen[1].answer
    assert "Running" not in str(tuner.study.decide()) and tuner.study.progress.search_s > 0
    assert (tuner.study.progress.process, tuner.study.progress.left_s) == (None, 0.0)


def test_progress_is_written_at_each_run_and_twice_a_minute(clock, line):
    kept = []
    with SearchProgress(
        0, open_line=lambda: line, now=clock, search_left_s=lambda: 90.0, write=kept.append
    ) as shown:
        shown.plan_begins()
        clock.now_s = 5.0
        shown.trial_begins({"batch_size": 64}, total=3)
        for clock.now_s in (5.5, 10.0, 36.0, 37.0):
            shown.show(0.1, {})
        shown.trial_ends(None)
        assert kept == [90.0, 90.0, 59.0, 58.0]
        clock.now_s = 50.0
        shown.trial_begins({"batch_size": 32}, total=2)
        clock.now_s = 55.0
        shown.trial_ends(None)
        assert kept[4:] == [90.0, None]  # The last trial has ended.


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Search with a live plot, and return the screen and the written file."""
    folder, screen = tmp_path_factory.mktemp("live"), Screen()
    live = kbatch.LivePlot(folder / "live.svg", interval_s=0, display=screen, now=FakeClock())
    searches.search(
        folder,
        searches.stock(batch_sizes=(8, 16)),
        kbatch.BatchSizeTuner,
        fit={"callbacks": [live]},
    )
    return screen, folder / "live.svg"


def test_live_plot_updates_one_figure(searched):
    screen, _ = searched
    assert len(screen.places) == 1
    # Two trials, each with a start, an epoch, the end of training and the end of the trial.
    assert screen.changes == 2 * 4 - 1
    picture = base64.b64decode(screen.pictures[0]["image/png"])
    assert picture.startswith(b"\x89PNG")
    assert "2 trials ended" in screen.pictures[0]["text/plain"]


def test_live_plot_under_grid_search_moves_to_a_new_output(tmp_path):
    screen = Screen()
    live = kbatch.LivePlot(interval_s=0, display=screen, now=FakeClock(tick_s=1.0))
    searches.quick(tmp_path, searches.stock(batch_sizes=(8, 16)), fit={"callbacks": [live]})
    assert len(screen.places) == 2
    assert screen.places[0] == {"text/plain": ""}
    assert len(screen.pictures) == 1


def test_live_plot_draws_in_a_tenth_of_the_time(searched, tmp_path):
    screen = Screen()
    # Each call of the clock takes a second. So a drawing takes one, and the next is ten later.
    live = kbatch.LivePlot(display=screen, interval_s=0, now=FakeClock(tick_s=1.0))
    live.show_ended(searched[1].parent / "search")
    drawn = screen.changes + len(screen.places)
    for epoch in range(1, 9):
        live.on_epoch_begin(epoch)
    assert screen.changes + len(screen.places) == drawn
