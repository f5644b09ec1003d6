"""Progress: its words, and what reaches a terminal, a log file and a notebook."""

import contextlib
import io
import re

import pytest
import records_factory
import searches
from fake_clock import FakeClock
from rich.console import Console

import kbatch
from kbatch.search.progress import (
    ConsoleLine,
    FitReporter,
    NotebookLine,
    SearchProgress,
    ending,
)


def progress(**changes):
    given = {
        "share": 0.25,
        "metrics": {"loss": 0.5, "val_accuracy": 0.91, "samples_per_second": 8123.4},
    }
    return given | changes


class Keeps:
    """A line that keeps what it is shown."""

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
    with SearchProgress(1, open_line=lambda: line, now=clock) as shown:
        yield shown


def test_the_live_line_has_time_left_throughput_memory_and_the_last_metrics(shown, clock, line):
    shown.trial_begins({"batch_size": 64}, ended=0, left=3)
    clock.now_s = 100.0  # Building and tracing say nothing about the epochs.
    shown.show(**progress(share=0.05))
    clock.now_s = 110.0
    shown.show(**progress(share=0.25))
    figures = "8,123 samples/s, val_accuracy 0.9100"
    assert line.live[-2:] == [f"5 %, {figures}", f"25 %, 0:38 left, {figures}"]
    # That of the search comes from the trials that ended.
    clock.now_s = 160.0
    shown.trial_ends(records_factory.make_study().trials[0])
    shown.trial_begins({"batch_size": 64}, ended=1, left=2)
    clock.now_s = 180.0
    shown.show(**progress(share=0.05))
    assert line.live[-1].startswith("5 %, search ")
    clock.now_s = 190.0
    shown.show(**progress(share=0.25))
    assert re.match(r"25 %, 0:38 left, search \d:\d\d left, 8,123", line.live[-1])


def test_what_the_plan_took_is_not_taken_again(clock):
    line = Keeps()
    line.changes = False
    planned = records_factory.make_trial(32, plan_s=40.0)
    with SearchProgress(1, open_line=lambda: line, now=clock) as shown:
        shown.trial_begins({"batch_size": 32}, ended=0, left=3)
        clock.now_s += 60.0
        shown.trial_ends(planned)
    assert "about 0:40 left" in line.lines[0]


def test_a_trial_of_several_executions_has_its_mean_and_interval():
    values = (0.90, 0.92, 0.94)
    executions = (records_factory.make_execution(32, accuracies=(v,)) for v in values)
    several = records_factory.make_trial(32, *executions)
    text = ending(several)
    half_width = 4.303 * 0.02 / 3**0.5
    assert f"val_accuracy 0.9200 ± {half_width:.2g}" in text
    assert text.endswith("(best epochs, mean of 3 executions)")


def test_the_reporter_shows_the_share_of_the_trial(shown, line):
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


def test_a_log_file_gets_lines_without_control_characters():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        line = ConsoleLine(Console())
        line.update("trial", 0.5, "half")
        line.print("trial 1")
        line.close()
    assert out.getvalue() == "trial 1\n"


def test_a_terminal_keeps_the_lines_and_takes_the_bar_away():
    out = io.StringIO()
    line = ConsoleLine(Console(file=out, force_terminal=True, width=100))
    line.update("trial 1", 0.5, "50 %, [bold] 0:30 left")
    line.print("trial 1 [bold] ended :x:")
    line.close()
    text = out.getvalue()
    assert "50 %, [bold] 0:30 left" in text
    assert "trial 1 [bold] ended :x:\n" in text
    assert text.endswith("\x1b[2K")


class Display:
    """IPython's `display`: outputs by their handles, in the order in which they were made."""

    def __init__(self):
        self.outputs = []

    def __call__(self, bundle, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(bundle["text/plain"])
        return Handle(self.outputs, len(self.outputs) - 1)


class Handle:
    def __init__(self, outputs, index):
        self.outputs, self.index = outputs, index

    def update(self, bundle, *, raw):
        self.outputs[self.index] = bundle["text/plain"]


def test_a_notebook_changes_outputs_of_its_own_only(capsys):
    display = Display()
    display({"text/plain": "the user's table"}, raw=True, display_id=True)
    line = NotebookLine(display)
    line.update("trial 1", 0.2, "20 %")
    line.update("trial 1", 0.5, "50 %")
    assert display.outputs == ["the user's table", "trial 1: 50 %"]
    line.print("trial 1 ended")
    line.update("trial 2", 0.5, "50 %")
    line.close()
    assert display.outputs == ["the user's table", "", ""]
    assert capsys.readouterr().out == "trial 1 ended\n"


def test_a_search_shows_a_line_a_trial_or_nothing(tmp_path):
    hypermodel = searches.stock(batch_sizes=(8, 32))
    for verbose, lines in ((1, 2), (0, 0)):
        with contextlib.redirect_stdout(out := io.StringIO()):
            searches.quick(tmp_path, hypermodel, kbatch.BatchSizeTuner, fit={"verbose": verbose})
        begins = [line.split(",")[0] for line in out.getvalue().splitlines()]
        assert begins == ["trial 1/2", "trial 2/2"][:lines]
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", out.getvalue())
