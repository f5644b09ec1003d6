import re

import pytest
from figure_studies import learned_study, max_batch_result, target_study

from kbatch.cli import main as cli
from kbatch.study.figures import FIGURES


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.json"
    learned_study().save(path)
    return path


def error_of(capsys, *words):
    assert cli.main(["plot", *map(str, words)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_it_writes_the_figure_that_is_named(study, tmp_path, capsys, suffix):
    path = tmp_path / f"figure.{suffix}"
    assert cli.main(["plot", str(study), "--figure", "pareto", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_size > 4000


def test_the_trials_are_drawn_where_none_is_named(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", str(study)]) == 0
    assert capsys.readouterr().out == "kbatch-trials.png\n"
    assert (tmp_path / "kbatch-trials.png").exists()


def test_help_lists_the_names(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plot", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert all(name in text for name in FIGURES)


def test_an_unknown_name_says_which_exist(study, capsys):
    error = error_of(capsys, study, "--figure", "trails")
    assert "trials, pareto" in error


def test_a_figure_that_lacks_its_data_says_what_to_do(study, capsys):
    assert "--target 0.95" in error_of(capsys, study, "--figure", "time-to-target")
    assert "NVIDIA GPU" in error_of(capsys, study, "--figure", "gpu-timeline")
    assert "MaxBatchSizeResult" in error_of(capsys, study, "--figure", "memory")


def test_a_target_can_be_given(study, tmp_path, capsys):
    words = ["--figure", "time-to-target", "--target", "0.5", "-o", str(tmp_path / "t.svg")]
    assert cli.main(["plot", str(study), *words]) == 0
    assert "target=0.5 for 'pareto'" in error_of(
        capsys, study, "--figure", "pareto", "--target", "0.5"
    )


def test_memory_is_drawn_from_the_file_of_a_result(tmp_path):
    max_batch_result().save(tmp_path / "result.json")
    words = ["plot", str(tmp_path / "result.json"), "--figure", "memory"]
    assert cli.main([*words, "-o", str(tmp_path / "m.pdf")]) == 0


def test_a_target_of_the_record_is_found(tmp_path):
    target_study().save(tmp_path / "study.json")
    words = ["plot", str(tmp_path / "study.json"), "--figure", "time-to-target"]
    assert cli.main([*words, "-o", str(tmp_path / "t.svg")]) == 0


def width_in(path):
    points = re.search(r'<svg[^>]*width="([\d.]+)pt"', path.read_text())
    return float(points[1]) / 72


@pytest.mark.parametrize("width", [3.4, 7.0])
def test_the_width_can_be_given(study, tmp_path, width):
    path = tmp_path / "t.svg"
    assert cli.main(["plot", str(study), "--width", str(width), "-o", str(path)]) == 0
    assert width_in(path) == pytest.approx(width)


@pytest.mark.parametrize("width", ["0", "-3", "nan", "1e9"])
def test_a_width_that_holds_no_figure_is_told(study, width, capsys):
    assert "width must lie between 3.25 and 40 inches" in error_of(
        capsys, study, f"--width={width}"
    )
