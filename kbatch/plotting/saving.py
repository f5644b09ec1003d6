"""Figures as files, and as SVG inside a page."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from kbatch.plotting.canvas import figure_of
from kbatch.plotting.palette import ALARM_TEXT, GRID, INK, MUTED, PAPER, series_style
from kbatch.records.json_codec import write_whole_file

_PNG_DPI = 200
# A date in the file would differ every time.
_METADATA: dict[str, dict[str, str | None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
_REPEATABLE: dict[Any, Any] = {"svg.hashsalt": "kbatch", "svg.fonttype": "path", "pdf.fonttype": 42}
_DESCRIPTION = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}
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
_MORE_DIGITS = re.compile(r"(?<=\.\d\d)\d+")
_SHIFTED = re.compile(r'transform="translate\(([\d.-]+) 0\)"/>')
# The page has the one rule of the style itself.
_LEFT_OUT = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| xmlns(?::xlink)?=\"[^\"]*\"",
    flags=re.DOTALL,
)
# A text with a halo: its outline as a stroke of the paper, then filled.
_HALO = re.compile(r'<path d="([^"]+)" style="([^"]*)"/><path d="\1" style="(fill: [^";]+)"/>')
_STYLE = re.compile(r' style="([^"]+)"')
_COLOR = re.compile(r"#[0-9a-f]{6}")
# Below this relative luminance a colour is lost on a dark page.
_DARK = 0.12
_EMPTY = re.compile(r"<defs>\s*</defs>|<g>\s*</g>|<g/>")


def save_figure(ax_or_figure: Axes | Figure, path: str | Path) -> None:
    """Write a figure as `.png`, `.svg` or `.pdf`, with the label of its Axes as description.

    The same figure gives the same bytes, and a PDF holds its fonts as TrueType.
    """
    path = Path(path)
    write_whole_file(path, figure_bytes(ax_or_figure, path.suffix.lower()))


def figure_bytes(ax_or_figure: Axes | Figure, suffix: str) -> bytes:
    if suffix not in _METADATA:
        raise ValueError(
            f"A figure's `path` must end in `.png`, `.svg` or `.pdf`. Received: suffix={suffix!r}."
        )
    figure = figure_of(ax_or_figure)
    labels = [str(axes.get_label()) for axes in figure.axes]
    # A label that matplotlib made, such as `<colorbar>`, describes nothing.
    description = " ".join(label for label in labels if label and not label.startswith("<"))
    content = io.BytesIO()
    metadata = _METADATA[suffix] | {_DESCRIPTION[suffix]: description or None}
    with matplotlib.rc_context(_REPEATABLE):
        figure.savefig(content, format=suffix[1:], dpi=_PNG_DPI, metadata=metadata)
    return content.getvalue()


def transparent_svg(ax: Axes) -> str:
    """Render a figure for a page without its backgrounds; the figure loses them."""
    figure = figure_of(ax)
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    figure.dpi, content = _PNG_DPI, io.StringIO()  # For marks that are pixels.
    with matplotlib.rc_context(_REPEATABLE):
        FigureCanvasSVG(figure).print_svg(content, metadata=_METADATA[".svg"])
    return content.getvalue()


class SvgPage:
    """The figures of one page, with what they share: outlines of glyphs, styles and ids."""

    def __init__(self):
        self._glyphs: dict[str, str] = {}
        self._styles: dict[str, str] = {}
        self._ids = 0

    def element(self, svg: str) -> str:
        """Make an SVG file an element of the page."""
        svg = svg[svg.index("<svg") :]
        names = {
            name: self._glyphs.setdefault(_shorter(outline), f"g{len(self._glyphs)}")
            for name, outline in _GLYPH.findall(svg)
        }
        svg = _LEFT_OUT.sub("", _GLYPH.sub("", svg))
        # Ids that nothing refers to are dropped, the others become names of the page.
        for _, name in _REFERENCE.findall(svg):
            if name not in names:
                names[name] = f"i{self._ids}"
                self._ids += 1
        svg = _ID.sub(lambda f: f' id="{names[f[1]]}"' if f[1] in names else "", svg)
        svg = _REFERENCE.sub(lambda f: f"{f[1]}{names[f[2]]}", svg).replace("xlink:href", "href")
        svg = _PLACES.sub(lambda found: _shorter(found[0]), svg)
        svg = _SHIFTED.sub(r'x="\1"/>', re.sub(r">\s+<", "><", svg))
        svg = _HALO.sub(_stroked_first, svg)
        for name, color in _PAGE_COLORS.items():
            svg = svg.replace(color, f"var(--figure-{name})")
        svg = _EMPTY.sub("", _EMPTY.sub("", _STYLE.sub(self._style_class, svg)))
        return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)

    def glyphs(self) -> str:
        """Make an element without a size that holds the outlines."""
        paths = "".join(
            f'<path id="{name}" d="{outline}" transform="scale(0.015625)"/>'
            for outline, name in self._glyphs.items()
        )
        return (
            f'<svg class="glyphs" aria-hidden="true" focusable="false"><defs>{paths}</defs></svg>'
        )

    def rules(self) -> str:
        """Write the style sheet of the figures; dark colours are lighter on a dark page."""
        rules = "\n".join(f".{name}{{{style}}}" for style, name in self._styles.items())
        dark = sorted({color for color in _COLOR.findall(rules) if _luminance(color) < _DARK})
        own = lighter = ""
        for color in dark:
            rules = rules.replace(color, f"var(--{color[1:]})")
            own += f"--{color[1:]}:{color};"
            red, green, blue = to_rgb(color)
            mixed = to_hex(((red + 1) / 2, (green + 1) / 2, (blue + 1) / 2))
            lighter += f"--{color[1:]}:{mixed};"
        scheme = "@media screen and (prefers-color-scheme: dark)"
        return f":root{{{own}}}\n{scheme}{{:root{{{lighter}}}}}\n{rules}"

    def _style_class(self, found: re.Match[str]) -> str:
        name = self._styles.setdefault(found[1], f"k{len(self._styles)}")
        return f' class="{name}"'


def _luminance(color: str) -> float:
    """Return the relative luminance of a colour, from 0 to 1 (WCAG 2.2)."""
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _stroked_first(halo: re.Match[str]) -> str:
    outline, stroke, fill = halo.groups()
    stroke = re.sub(r"fill: [^;]+;?\s*", "", stroke)
    return f'<path d="{outline}" style="{stroke}; {fill}; paint-order: stroke"/>'


def _shorter(places: str) -> str:
    return _MORE_DIGITS.sub("", " ".join(places.split()) if "\n" in places else places)
