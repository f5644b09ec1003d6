"""SVG figures that share a page."""

import functools
import re

from records_factory import make_study

from kbatch.plotting.canvas import detached_axes
from kbatch.plotting.saving import SvgPage, transparent_svg
from kbatch.study.figures.trials import HEIGHT_IN, plot_trials


@functools.cache
def drawing():
    axes = plot_trials(make_study(), detached_axes(HEIGHT_IN))
    return transparent_svg(axes)


def ids(text):
    return re.findall(r' id="([^"]+)"', text)


def references(text):
    return re.findall(r'(?:href="#|url\(#)([^")]+)', text)


def test_two_figures_share_no_id_and_every_reference_is_met():
    page = SvgPage()
    first, second = page.element(drawing()), page.element(drawing())
    text = page.glyphs() + first + second
    assert len(ids(text)) == len(set(ids(text)))
    assert set(references(text)) <= set(ids(text))


def test_every_style_is_a_class_of_the_page():
    page = SvgPage()
    element = page.element(drawing())
    assert "style=" not in element
    used = set(re.findall(r'class="(k\d+)"', element))
    assert used == set(re.findall(r"^\.(k\d+)\{", page.rules(), flags=re.MULTILINE))


def test_a_figure_loses_more_than_half_of_its_weight():
    svg = drawing()
    assert len(SvgPage().element(svg)) < len(svg) / 2


def test_a_dark_colour_is_lighter_on_a_dark_page_and_a_light_one_stays():
    page = SvgPage()
    page.element('<svg><path style="fill: #440154"/><path style="fill: #fde725"/></svg>')
    assert "fill: var(--440154)" in page.rules()
    assert "(prefers-color-scheme: dark){:root{--440154:#a280aa;}}" in page.rules()
    assert "fill: #fde725" in page.rules()
