import argparse
import re

import pytest
from small_models import mlp

from kbatch.cli import main as cli
from kbatch.cli.measure import add_inference, milliseconds
from kbatch.inference.figures import FIGURES
from kbatch.inference.profile import InferenceProfile


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "net.keras"
    mlp().save(path)
    return path


@pytest.mark.parametrize(
    ("text", "expected"), [("20ms", 20), ("500us", 0.5), ("0.1s", 100), (" 1.5 ms ", 1.5)]
)
def test_a_target_is_read_with_its_unit(text, expected):
    assert milliseconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["20", "ms", "-3ms", "20 minutes", "0ms"])
def test_a_target_without_unit_or_size_is_refused(text):
    with pytest.raises(ValueError, match="such as 20ms"):
        milliseconds(text)


def test_it_measures_a_file_and_writes_profile_table_and_figures(
    model_file, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = ("--slo", "10s", "--paths", "compiled, predict", "--batch-sizes", "1,64")
    assert cli.main(["inference", str(model_file), *words, "--seconds", "2"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "\x1b" not in out
    for words in ("Batch size 64", "within 10000 ms", "Verified", "Samples/s", "Timings"):
        assert words in out, words
    # Where the time did not suffice for both call paths, nothing can be drawn of them.
    left_out = set(re.findall(r"^no figure (\w+): ", out, re.MULTILINE))
    assert left_out <= {"paths", "noise"}
    folder = tmp_path / "kbatch-inference"
    assert {path.name for path in folder.iterdir()} == {
        "profile.json",
        "profile.csv",
        *(f"{name}.png" for name in FIGURES if name not in left_out),
    }
    profile = InferenceProfile.load(folder / "profile.json")
    assert profile.series == (("compiled", "float32"), ("predict", "float32"))


def error_of(capsys, *words):
    """The one line that a command ends with, in this process."""
    assert cli.main(["inference", *map(str, words)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_file_that_is_no_model_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.keras").write_text("no model")
    line = error_of(capsys, "other.keras")
    assert line.startswith("kbatch: The model file must be one that `model.save` wrote")
    assert "does not exist" in error_of(capsys, "missing.keras")


def test_a_target_below_one_example_is_told_in_a_line(model_file, tmp_path, capsys):
    words = (model_file, "--slo", "1us", "--no-memory", "--batch-sizes", "1,8", "-o", tmp_path)
    assert "at least what batch size 1 takes" in error_of(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--slo", "20"), "such as 20ms"), (("--batch-sizes", "1,x"), "integers with commas")],
)
def test_wrong_words_are_told_before_the_model_is_read(words, message, capsys):
    assert message in error_of(capsys, "missing.keras", *words)


def test_it_is_a_command():
    parser = argparse.ArgumentParser()
    add_inference(parser.add_subparsers())
    options = parser.parse_args(["inference", "m.keras"])
    assert (options.quantile, options.paths, options.slo) == (0.95, "compiled", None)
