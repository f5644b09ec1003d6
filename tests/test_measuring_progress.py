"""Progress that a measurement shows."""

import inspect

import keras
import numpy as np
import pytest
from fake_clock import FakeClock

import kbatch
from kbatch.cli.main import command_parser
from kbatch.errors import InputError
from kbatch.progress import MeasuringProgress


class Line:
    """A line that can be replaced, as in a terminal or a notebook, or a line of a log."""

    def __init__(self, changes):
        self.changes, self.shown, self.printed, self.closed = changes, [], [], False

    def update(self, name, share, figures):
        self.shown.append((name, share, figures))

    def print(self, text):
        self.printed.append(text)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("verbose", ["auto", 0, 1, 2])
@pytest.mark.parametrize("terminal", [True, False])
def test_measuring_progress_in_terminal_and_log(terminal, verbose):
    line, clock = Line(terminal), FakeClock()
    progress = MeasuringProgress(
        "memory", verbose, time_budget_s=60.0, open_line=lambda: line, now=clock
    )
    progress.say("not open")
    with progress:
        for step in range(3):
            clock.sleep(30.0)
            progress.say(f"step {step}")
            for _ in range(40):
                clock.sleep(0.5)
                progress.tick("round")
    progress.say("closed")
    bar = terminal and verbose in ("auto", 1)
    steps = [(share, text) for _, share, text in line.shown if "step" in text]
    assert steps == ([(0.5, "30 s, step 0"), (1.0, "80 s, step 1"), (1.0, "130 s, step 2")] * bar)
    assert len(line.shown) == bar * 3 * 41
    lines = [text for text in line.printed if "step" in text]
    assert len(lines) == (0 if bar or verbose == 0 else 3)
    assert line.printed[-1:] == ["memory: 150 s"] * (verbose != 0)
    assert len(line.printed) == len(lines) * 3 + (verbose != 0)  # Rounds every ten seconds.
    assert line.closed == (verbose != 0)


MODEL = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
ROWS = np.zeros((4, 2))
MEASURING = {
    "max-batch": kbatch.find_max_batch_size,
    "inference": kbatch.profile_inference,
    "input": kbatch.profile_input_pipeline,
    "recommend": kbatch.recommend,
    None: kbatch.profile_training,
}


@pytest.mark.parametrize("command", MEASURING)
def test_verbose_of_functions_and_commands(command):
    function = MEASURING[command]
    assert inspect.signature(function).parameters["verbose"].default == "auto"
    with pytest.raises(InputError, match="`verbose` must be"):
        function(MODEL, ROWS, verbose=3)
    if command is not None:
        data = [] if command == "inference" else ["tests:build", "--data", "tests:data"]
        options = [command, *(data or ["model.keras"]), "--verbose", "0"]
        assert command_parser().parse_args(options).verbose == 0
