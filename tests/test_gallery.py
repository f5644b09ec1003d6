"""The gallery: an entry for each figure, its picture, and code that draws it."""

import re
import struct

import pytest
from code_blocks import ROOT, blocks

import kbatch

PAGE = ROOT / "docs" / "gallery.md"
FIGURES = [name for name in kbatch.__all__ if name.startswith("plot_")]
MOST_BYTES, MOST_BYTES_IN_ALL = 80_000, 1_000_000


def pictures():
    return re.findall(r"^!\[(.+)\]\((images/gallery/.+)\)$", PAGE.read_text(), re.MULTILINE)


def test_gallery_has_three_lines_and_a_picture_of_each_figure():
    codes = blocks(PAGE, "python")
    drawn = [re.search(r"^ax = kbatch\.(plot_\w+)\(", code, re.MULTILINE)[1] for code in codes]
    assert sorted(drawn) == sorted(FIGURES)
    assert {len(list(filter(None, code.splitlines()))) for code in codes} == {3}
    names = [name.removeprefix("plot_").replace("_", "-") for name in drawn]
    assert [path for _, path in pictures()] == [f"images/gallery/{name}.png" for name in names]


def test_gallery_pictures_exist_and_are_small():
    sizes = [(ROOT / "docs" / path).stat().st_size for _, path in pictures()]
    assert max(sizes) < MOST_BYTES
    assert sum(sizes) < MOST_BYTES_IN_ALL
    kept = {path.name for path in (ROOT / "docs" / "images" / "gallery").iterdir()}
    assert kept == {path.rpartition("/")[2] for _, path in pictures()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_gallery_code_draws_the_figure(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = [code for code in blocks(PAGE, "python") if f"kbatch.{name}(" in code]
    names = {}
    exec(compile(code, name, "exec"), names)
    picture = ROOT / "docs" / "images" / "gallery" / f"{name[5:].replace('_', '-')}.png"
    # The picture is as wide and about as high as the figure that the lines draw.
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    drawn = names["ax"].figure.get_size_inches()
    assert height / width == pytest.approx(drawn[1] / drawn[0], abs=0.02)
