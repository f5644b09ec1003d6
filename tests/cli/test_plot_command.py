import re

import pytest
from figure_studies import learned_study, max_batch_result, target_study

from kbatch.cli import main as cli


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.json"
    learned_study().save(path)
    return path


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_it_writes_the_figure_that_is_named(study, tmp_path, capsys, suffix):
    path = tmp_path / f"figure.{suffix}"
    assert cli.main(["plot", str(study), "--figure", "pareto", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_size > 4000


def test_a_target_can_be_given(study, tmp_path):
    words = ["--figure", "time-to-target", "--target", "0.5", "-o", str(tmp_path / "t.svg")]
    assert cli.main(["plot", str(study), *words]) == 0


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
