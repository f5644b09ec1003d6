import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import inference_factory
import input_profile_factory
import numpy as np
import pandas as pd
import pytest
from figure_studies import learned_study, max_batch_result
from records_factory import make_study, make_trial

import kbatch
from kbatch.cli import main as cli


def run(*words, cwd=None, code=0):
    """Run a command line in a new process."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run a quick demo on few images, and return its directory and its output."""
    directory = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        few_images(patch)
        words = ["demo", "--quick", "--policy", "float32", "--output", str(directory)]
        assert cli.main(words) == 0
    return directory, out.getvalue()


def few_images(patch):
    rng = np.random.default_rng(0)
    images = rng.random((900, 28, 28, 1), "float32"), rng.integers(0, 10, 900)
    patch.setattr("kbatch.cli.demo.load_images", lambda: images)


def test_demo_output(demo):
    directory, output = demo
    assert re.search(r"trial 2/3, batch +128, .* samples/s, val_accuracy 0\.\d+", output)
    assert re.search(r"^[* ] +32 +0\.001 ", output, re.MULTILINE)
    for file in ("trials.png", "report.html"):
        assert str(directory / file) in output
        assert (directory / file).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("data", ["images", "texts"])
def test_demo_output_has_no_log_lines(tmp_path, data):
    words = ["demo", "--data", data, "--quick", "--output", str(tmp_path)]
    done = run(sys.executable, "-m", "kbatch", *words)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "oneDNN" not in done.stdout


def test_demo_accumulates_gradients(demo):
    study = kbatch.load_study(demo[0] / "demo-search")
    assert [trial.last.accumulation_steps for trial in study.trials] == [1, 1, 4]
    assert {trial.dtype_policy for trial in study.trials} == {"float32"}


@pytest.mark.slow
def test_demo_options_and_seed(tmp_path, monkeypatch):
    few_images(monkeypatch)
    metrics = []
    for folder in ("first", "again"):
        flags = ["--policy", "float32", "--seed", "3", "--batch-sizes", "512"]
        assert cli.main(["demo", "--quick", "--output", str(tmp_path / folder), *flags]) == 0
        (trial,) = kbatch.load_study(tmp_path / folder / "demo-search").trials
        assert (trial.batch_size, trial.dtype_policy) == (512, "float32")
        metrics.append(trial.metrics)
    assert metrics[0] == metrics[1]


def test_report_plot_and_export_write_files(demo, tmp_path, capsys):
    project = str(demo[0] / "demo-search")
    commands = {"report.md": "report", "trials.svg": "plot"}
    for name, command in (
        commands | {f"trials.{end}": "export" for end in ("csv", "json")}
    ).items():
        path = tmp_path / name
        assert cli.main([command, project, "-o", str(path)]) == 0
        assert path.stat().st_size > 100
        printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert printed[-1] == path
        assert all(file.stat().st_size > 100 for file in printed)
        assert len(printed) == 1 or name == "report.md"
    assert list(pd.read_csv(tmp_path / "trials.csv").batch_size) == [32, 128, 512]
    path = tmp_path / "runs.csv"
    assert cli.main(["export", project, "--runs", "-o", str(path)]) == 0
    runs = pd.read_csv(path)
    assert sorted(set(runs.batch_size)) == [32, 128, 512]
    assert len(runs) == sum(len(trial.executions) for trial in kbatch.load_study(project).trials)


@pytest.mark.parametrize("file", ["profile.json", "input.json"])
def test_report_and_plot_take_the_folder_of_a_profile(tmp_path, file):
    factory = inference_factory if file == "profile.json" else input_profile_factory
    factory.make_profile().save(tmp_path / file)
    for command, output in (("report", tmp_path / "report.html"), ("plot", tmp_path / "main.png")):
        assert cli.main([command, str(tmp_path), "-o", str(output)]) == 0
        assert output.stat().st_size > 10_000


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_export_to_a_file_name_that_is_not_utf8(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    tuned = {"shift": -0.5, "exponent": -3, "written": "-1e-3", "layer": "relu"}
    make_study(make_trial(16, hyperparameters=tuned)).save(folder / "study.json")
    assert cli.main(["export", str(folder / "study.json"), "-o", str(folder / "t.csv")]) == 0
    (row,) = pd.read_csv(folder / "t.csv").to_dict("records")
    assert {name: row[name] for name in tuned} == tuned | {"written": -0.001}
    assert "\\udce9" in capsys.readouterr().out


def test_plot_options_width_and_target(tmp_path):
    learned_study().save(tmp_path / "study.json")
    max_batch_result().save(tmp_path / "result.json")
    for record, name, *words in (
        ("study", "time-to-target", "--target", "0.5"),
        ("result", "memory"),
        ("study", "trials", "--width", "3.4"),
    ):
        path = tmp_path / f"{name}.svg"
        words = ["plot", str(tmp_path / f"{record}.json"), "--figure", name, *words]
        assert cli.main([*words, "-o", str(path)]) == 0
    points = re.search(r'<svg[^>]*width="([\d.]+)pt"', path.read_text())
    assert float(points[1]) / 72 == pytest.approx(3.4)


def test_help_does_not_import_tensorflow():
    done = run(sys.executable, "-X", "importtime", "-m", "kbatch", "--help")
    assert "demo" in done.stdout
    assert "tensorflow" not in done.stderr
