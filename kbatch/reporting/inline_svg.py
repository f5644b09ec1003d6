"""SVG figures inside a page: its colours, no ids in common, each glyph once."""

import re
from collections.abc import Mapping

from kbatch.reporting.figures.palette import ALARM_TEXT, GRID, INK, MUTED, PAPER, series_style

# Colours of a figure that the page sets for light and dark, by name in the style sheet.
_PAGE_COLORS = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "paper": PAPER,
    "alarm": ALARM_TEXT,
    "first": series_style(0).color,
}
# Matplotlib writes a glyph as a path in font units with this scale, before its first use.
_GLYPH = re.compile(r'<path id="([^"]+)" d="([^"]*)" transform="scale\(0\.015625\)"\s*/>')
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'((?:xlink:href="#|url\(#))([^")]+)')
# Attributes that hold places, whose hundredth of a point nobody sees.
_PLACES = re.compile(r'(?:\bd|\bx|\by|points)="[^"]*"|translate\([^)]*\)')
_LONG_NUMBER = re.compile(r"(\.\d\d)\d+")
_SHIFTED = re.compile(r'transform="translate\(([\d.-]+) 0\)"/>')
# The page has the one rule of the style itself.
_LEFT_OUT = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| xmlns(?::xlink)?=\"[^\"]*\"",
    flags=re.DOTALL,
)
# A text with a halo: its outline as a stroke of the paper, then filled.
_HALO = re.compile(r'<path d="([^"]+)" style="([^"]*)"/><path d="\1" style="(fill: [^";]+)"/>')
_EMPTY = re.compile(r"<defs>\s*</defs>|<g>\s*</g>|<g/>")


def inline_svg(svg: str, prefix: str, glyphs: dict[str, str]) -> str:
    """Makes an SVG file an element of a page.

    Args:
        svg: The file, as matplotlib wrote it.
        prefix: What tells its ids from those of other figures in the page.
        glyphs: Ids of the outlines of glyphs in the page; those of the figure are added.

    Returns:
        The element, which refers to the glyphs by their ids.
    """
    svg = svg[svg.index("<svg") :]
    own = {
        name: glyphs.setdefault(_shorter(outline), f"g{len(glyphs)}")
        for name, outline in _GLYPH.findall(svg)
    }
    svg = _LEFT_OUT.sub("", _GLYPH.sub("", svg))
    svg = _with_ids(svg, prefix, own).replace("xlink:href", "href")
    svg = _PLACES.sub(lambda found: _shorter(found[0]), svg)
    svg = _SHIFTED.sub(r'x="\1"/>', re.sub(r">\s+<", "><", svg))
    svg = _EMPTY.sub("", _EMPTY.sub("", svg))
    svg = _HALO.sub(_stroked_first, svg)
    for name, color in _PAGE_COLORS.items():
        svg = svg.replace(color, f"var(--figure-{name})")
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def glyph_sheet(glyphs: Mapping[str, str]) -> str:
    """Makes an element without a size that holds the outlines of glyphs, by their ids."""
    paths = "".join(
        f'<path id="{name}" d="{outline}" transform="scale(0.015625)"/>'
        for outline, name in glyphs.items()
    )
    return f'<svg class="glyphs" aria-hidden="true" focusable="false"><defs>{paths}</defs></svg>'


def _with_ids(svg: str, prefix: str, glyphs: Mapping[str, str]) -> str:
    """Drops ids that nothing refers to, and tells the others from those of other figures."""
    referred = {name for _, name in _REFERENCE.findall(svg)}
    svg = _ID.sub(lambda f: f' id="{prefix}{f[1]}"' if f[1] in referred else "", svg)
    return _REFERENCE.sub(lambda f: f"{f[1]}{glyphs.get(f[2], prefix + f[2])}", svg)


def _stroked_first(halo: re.Match[str]) -> str:
    outline, stroke, fill = halo.groups()
    stroke = re.sub(r"fill: [^;]+;?\s*", "", stroke)
    return f'<path d="{outline}" style="{stroke}; {fill}; paint-order: stroke"/>'


def _shorter(places: str) -> str:
    return _LONG_NUMBER.sub(r"\1", " ".join(places.split()))
