"""Draw and save figures: colours, panels, title, legend, caption, and files.

The colours of series are from Okabe and Ito (2008), "Color universal design", with grey instead of
black. They differ for every kind of colour vision. Each series also has its own marker, so that a
figure works in black and white.
"""

import base64
import colorsys
import io
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.gridspec import GridSpec
from matplotlib.textpath import text_to_path
from matplotlib.transforms import ScaledTranslation

from kbatch.records.json_codec import write_whole_file

INK = "#24292f"
MUTED = "#59636e"
GRID = "#d9dee3"
FAINT = "#afb8c1"
PAPER = "#ffffff"
ALARM = "#d55e00"
# A darker vermilion, readable as small text on paper.
ALARM_TEXT = "#a84300"
WIDTH_IN = 6.4
# A narrower figure has no room for its labels.
LEAST_WIDTH_IN = 3.25
MOST_WIDTH_IN = 40.0
SMALL_PT = 7.5
# Size of texts, and of all texts in a low figure.
TEXT_PT, LOW_PT = 8, 6.5
# Mean width of a digit, in font sizes.
DIGIT_EM = 0.62
# Width of the y axis's tick labels.
_LABELS_IN = 0.7
_LINE_SPACING = 1.35
# Room beside a caption, and the separator of its facts.
_BESIDE_IN = 0.2
_FACT_MARK = " · "
# Characters in a row of the legend, and the width of a marker in characters.
_ROW_CHARACTERS, _HANDLE_CHARACTERS = 78, 6
_TITLE_CHARACTERS = 100
# A lower figure has short names, and a lower panel has its label above it.
_LOW_FIGURE_IN, _LOW_PANEL_IN = 2.2, 1.2
# Height of title and labels, and of a label above a panel.
_AROUND_IN, _LABEL_PT = 1.0, 11
_PNG_DPI = 200
# Files have no date, so that the same figure gives the same bytes.
_METADATA: dict[str, Any] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_REPEATABLE: dict[Any, Any] = {"svg.hashsalt": "kbatch", "svg.fonttype": "path", "pdf.fonttype": 42}
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
# Decimals after the second one, to drop them from an SVG. Small numbers keep them, such as the
# scale 0.015625 of a glyph.
_MORE_DIGITS = re.compile(r"(?<=[1-9]\.\d\d)\d+|(?<=\d0\.\d\d)\d+")


def detached_axes(height_in: float, *, width_in: float = WIDTH_IN) -> Axes:
    """Make Axes in a figure that pyplot does not know, so that no notebook shows it."""
    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    return figure.add_subplot()


def draw_so_wide(draw: Callable[..., Axes], width_in: float) -> Axes:
    """Draw a figure at another width than the usual one, with panels of the same height."""
    if not LEAST_WIDTH_IN <= width_in <= MOST_WIDTH_IN:
        raise ValueError(
            f"A figure's width must be between {LEAST_WIDTH_IN:g} and {MOST_WIDTH_IN:g} inches. "
            f"Received: {width_in:g}."
        )
    usual = figure_of(draw(None, caption=False))
    axes = draw(detached_axes(usual.get_figheight(), width_in=width_in))
    figure = figure_of(axes)
    figure.set_figheight(usual.get_figheight() + max(0.0, _legends_in(figure) - _legends_in(usual)))
    _add_caption(axes)
    return axes


def _legends_in(figure: Figure) -> float:
    """Return the height of the legends between panels and titles, in inches."""
    panels: Any = figure.axes  # matplotlib's types do not name `titleOffsetTrans`.
    return float(sum(ax.titleOffsetTrans.get_matrix()[1, 2] for ax in panels) / figure.dpi)


def figure_of(ax_or_figure: Axes | Figure) -> Figure:
    figure = ax_or_figure.get_figure(root=True)
    if figure is None:
        raise ValueError("`ax` has no figure: give other Axes, or None. Received: ax.figure=None.")
    return figure


def width_share(ax: Axes) -> float:
    """Return the width of a figure divided by the usual width, both without labels; at most 1."""
    return min(1.0, (figure_of(ax).get_figwidth() - _LABELS_IN) / (WIDTH_IN - _LABELS_IN))


def height_in(ax: Axes) -> float:
    """Estimate the height of a panel, before the layout."""
    return (figure_of(ax).get_figheight() - _AROUND_IN) * ax.get_position().height


def label_rows(ax: Axes) -> int:
    """Estimate how many tick labels fit above each other on the y axis, before the layout."""
    return int(72 * height_in(ax) / (1.2 * text_pt(ax)))


def is_low(ax: Axes) -> bool:
    """Return whether the place of a figure is too low for long names."""
    figure, spec = figure_of(ax), ax.get_subplotspec()
    place = spec.get_topmost_subplotspec().get_position(figure) if spec else ax.get_position()
    return figure.get_figheight() * place.height < _LOW_FIGURE_IN


def text_pt(ax: Axes, usual_pt: float = TEXT_PT) -> float:
    """Return the size of a text, which is smaller in a low figure."""
    return min(LOW_PT, usual_pt) if is_low(ax) else usual_pt


def _write_label_above(ax: Axes) -> bool:
    """Write the label of the y axis above a low panel, and return whether this was done."""
    figure, text = figure_of(ax), " ".join(ax.get_ylabel().split())
    above = bool(text) and figure.get_figheight() * ax.get_position().height < _LOW_PANEL_IN
    if above:
        look: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        look |= {"va": "bottom", "color": INK, "fontsize": text_pt(ax), "parse_math": False}
        ax.annotate(text, (0, 1), (0, 2), **look)
        ax.set_ylabel("")
    return above


def label_room(ax: Axes) -> float:
    """Estimate how many characters of tick labels fit on the x axis, before the layout."""
    width_in = figure_of(ax).get_figwidth()
    shrunk = min(1.0, (width_in - _LABELS_IN) / width_in)
    return 72 * width_in * ax.get_position().width * shrunk / (TEXT_PT * DIGIT_EM)


def panels(
    ax: Axes | None, height_in: float, heights: Sequence[float] = (1,), *, share_x: bool = True
) -> list[Axes]:
    """Make panels, one above the other, in a new figure or in the place of given Axes."""
    if ax is not None:
        first = ax
    elif "ipykernel" in sys.modules:
        # A notebook shows figures that pyplot knows. Elsewhere pyplot would keep them in memory.
        from matplotlib import pyplot

        first = pyplot.figure(figsize=(WIDTH_IN, height_in), layout="constrained").add_subplot()
    else:
        first = detached_axes(height_in)
    axes, count, figure = [first], len(heights), figure_of(first)
    if count > 1:
        if (place := first.get_subplotspec()) is not None:
            gap = 0.08 if share_x else 0.12
            rows = place.subgridspec(count, 1, height_ratios=heights, hspace=gap)
        else:  # Axes without a grid have no layout, so the room for labels is set here.
            (left, bottom), (right, top) = first.get_position().get_points()
            edges = {"left": left, "right": right, "bottom": bottom, "top": top}
            gap_in, tall_in = 0.3 if share_x else 0.85, figure.get_figheight()
            gap = gap_in * count / max(0.5, (top - bottom) * tall_in - gap_in * (count - 1))
            rows = GridSpec(count, 1, figure, height_ratios=heights, hspace=gap, **edges)
        first.set_subplotspec(rows[0])
        shared = first if share_x else None
        axes += [first.figure.add_subplot(rows[i], sharex=shared) for i in range(1, count)]
    for panel in axes:
        tidy(panel)
    for panel in axes[:-1] if share_x else ():
        panel.tick_params(labelbottom=False)
    return axes


def tidy(ax: Axes) -> None:
    """Draw a light horizontal grid, and remove spines and tick marks."""
    ax.set_axisbelow(True)
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.6, linestyle="-")
    ax.grid(visible=False, axis="x", which="both")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set(color=MUTED, linewidth=0.8)
    size_pt = text_pt(ax)
    ax.tick_params(axis="y", length=0, left=False, labelsize=size_pt, labelcolor=INK)
    ax.tick_params(axis="x", color=MUTED, labelsize=size_pt, labelcolor=INK)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set(color=INK, fontsize=size_pt)


def vertical_grid(ax: Axes) -> None:
    """Draw a vertical grid, so that values can be read on the x axis."""
    ax.grid(visible=True, axis="x", color=GRID, linewidth=0.6)


def write_message(ax: Axes, text: str) -> None:
    """Write a message in the middle of Axes without data."""
    ax.set_yticks([])
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": MUTED, "fontsize": TEXT_PT}
    ax.text(0.5, 0.5, textwrap.fill(text, 70), transform=ax.transAxes, parse_math=False, **look)


def shortened(text: str, characters: int) -> str:
    """Shorten a text that is too long, as in "learning…"."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def name_room(ax: Axes) -> int:
    """Return how many characters of a name fit in a row of the legend."""
    return int(width_share(ax) * _ROW_CHARACTERS * TEXT_PT / text_pt(ax)) - _HANDLE_CHARACTERS


def write_title(
    ax: Axes, title: str, *, columns: int = 0, fewest: int = 2, rows_below: int = 0
) -> None:
    """Write the title of a panel, and below it a legend with at most `columns` columns.

    The legend is left out if there are fewer than `fewest` series.
    """
    above, size_pt, rows = _write_label_above(ax), text_pt(ax), float(rows_below)
    share, below_pt = width_share(ax) * TEXT_PT / size_pt, _LABEL_PT * above
    untitled = above and is_low(ax)
    handles, names = ax.get_legend_handles_labels()
    if columns and len(names) >= fewest:
        wrap: dict[str, Any] = {"max_lines": 3, "placeholder": "…"}
        names = [textwrap.fill(name, name_room(ax), **wrap) for name in names]
        longest = max(len(line) for name in names for line in name.split("\n"))
        longest += _HANDLE_CHARACTERS
        columns = max(1, min(columns, int(share * _ROW_CHARACTERS) // longest))
        columns = math.ceil(len(names) / math.ceil(len(names) / columns))  # Rows of equal length.
        in_rows = (names[i : i + columns] for i in range(0, len(names), columns))
        # A second line of a name is lower than a row.
        rows += sum(1 + 0.9 * max(name.count("\n") for name in row) for row in in_rows)
        # matplotlib fills a legend by columns. This order makes it read by rows.
        order = [i for column in range(columns) for i in range(column, len(names), columns)]
        up = ScaledTranslation(0, below_pt / 72, figure_of(ax).dpi_scale_trans)
        look: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
        look |= {"bbox_transform": ax.transAxes + up, "frameon": False, "labelcolor": INK}
        look |= {"columnspacing": 1.2, "handletextpad": 0.5, "ncols": columns, "fontsize": size_pt}
        legend = ax.legend([handles[i] for i in order], [names[i] for i in order], **look)
        for text in legend.get_texts():
            text.set_parse_math(False)
        # The layout would make the panel as wide as the legend. Without a title it is needed.
        legend.set_in_layout(untitled)
    title = shortened(title, _TITLE_CHARACTERS)
    title = textwrap.fill(title, int(share * 64))  # Shorter lines in a narrow figure.
    # `y` is the place that matplotlib's automatic placement would choose.
    style: dict[str, Any] = {"loc": "left", "y": 1, "pad": below_pt + 6 + 1.6 * size_pt * rows}
    style |= {"fontsize": size_pt + 1.5, "fontweight": "bold", "parse_math": False, "color": INK}
    # In a low figure, the label above the panel takes the place of the title.
    ax.set_title(title, **style).set_visible(not untitled)


def write_subtitle(ax: Axes, text: str, *, color: str = INK) -> None:
    """Write a bold text above a lower panel."""
    characters = round(width_share(ax) * 60 * TEXT_PT / text_pt(ax))
    text = textwrap.fill(text, characters, max_lines=5, placeholder=" …")
    pad_pt = 4 + _LABEL_PT * _write_label_above(ax)
    look: dict[str, Any] = {"fontsize": text_pt(ax), "color": color, "fontweight": "bold"}
    ax.set_title(text, loc="left", y=1, pad=pad_pt, parse_math=False, **look)


def write_caption(
    panels: Sequence[Axes],
    *notes: str,
    of: str = "",
    result: str = "",
    facts: Sequence[str] = (),
    caption: bool = True,
) -> None:
    """Describe panels in the label of the first one, and write a caption below them.

    The first line of the label is an alternative text for readers who do not see the figure: what
    it is a chart `of`, and its main `result`. Default of both: the title. Each note has its own
    line, and the facts are in the last line.
    """
    for panel in panels:
        _write_label_above(panel)
    charts, title = "Charts" if len(panels) > 1 else "Chart", panels[0].get_title(loc="left")
    shown = of or (title if title[:2].isupper() else title[:1].lower() + title[1:])
    description = f"{charts} of {shown}. {(result or title).removesuffix('.')}."
    lines = (description, *filter(None, notes), _FACT_MARK.join(filter(None, facts)))
    panels[0].set_label("\n".join(" ".join(line.split()) for line in lines))
    if caption:
        _add_caption(panels[0])


def caption_lines(ax: Axes) -> tuple[str, str]:
    """Return a line of notes, which may be empty, and a line of facts from the label of Axes."""
    _, *notes, facts = str(ax.get_label()).split("\n")
    return " ".join(notes), facts


def _add_caption(ax: Axes) -> None:
    """Write a caption below a figure, and make the figure higher by its height."""
    figure, font = figure_of(ax), FontProperties(size=SMALL_PT)
    width_in, lines = figure.get_figwidth(), list[str]()
    for line in filter(None, caption_lines(ax)):
        line = line.replace("`", "")
        width_pt, *_ = text_to_path.get_text_width_height_descent(line, font, ismath=False)
        # Characters differ in width, so a part of a line may be wider than its share.
        room = 72 * (width_in - _BESIDE_IN) / width_pt
        characters = len(line) if room >= 1 else int(0.95 * room * len(line))
        lines += textwrap.wrap(re.sub(" (?=[%·])", "\N{NO-BREAK SPACE}", line), characters)
    look: dict[str, Any] = {"fontsize": SMALL_PT, "color": MUTED, "linespacing": _LINE_SPACING}
    figure.supxlabel("\n".join(lines), x=0.012, ha="left", parse_math=False, **look)
    grown_pt = 4 + len(lines) * 1.2 * _LINE_SPACING * SMALL_PT
    figure.set_figheight(figure.get_figheight() + grown_pt / 72)


# The last one is grey, because black would not show on a dark page.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#767676")
_MARKERS = "os^DvP"


def series_style(index: int) -> tuple[str, str]:
    """Return the colour and the marker of a series. They repeat after the sixth."""
    return _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]


def size_color(batch_size: int, sizes: Sequence[int]) -> tuple[float, float, float]:
    """Return the colour of a batch size on a logarithmic scale over the sizes of a figure."""
    span = math.log(sizes[-1] / sizes[0])
    share = math.log(batch_size / sizes[0]) / span if span else 1.0
    # viridis (van der Walt and Smith 2015) has an even lightness for every kind of colour vision.
    # Its yellow end is left out, because it would not show on paper.
    red, green, blue, _ = matplotlib.colormaps["viridis"](0.82 * (1 - share))
    return float(red), float(green), float(blue)


def save_figure(ax_or_figure: Axes | Figure, path: str | Path) -> None:
    """Write a figure as `.png`, `.svg` or `.pdf`, with the labels of its Axes as description."""
    path = Path(path)
    write_whole_file(path, figure_bytes(ax_or_figure, path.suffix.lower()))


def figure_bytes(ax_or_figure: Axes | Figure, suffix: str) -> bytes:
    if suffix not in _METADATA:
        raise ValueError(
            f"A figure's `path` must end in `.png`, `.svg` or `.pdf`. Received: suffix={suffix!r}."
        )
    figure = figure_of(ax_or_figure)
    labels = [str(axes.get_label()).replace("\n", " ") for axes in figure.axes]
    # matplotlib's own labels, such as `<colorbar>`, are left out.
    description = " ".join(label for label in labels if label and not label.startswith("<"))
    field = "Subject" if suffix == ".pdf" else "Description"
    return _printed(figure, suffix, _METADATA[suffix] | {field: description or None})


def _printed(figure: Figure, suffix: str, metadata: Mapping[str, str | None]) -> bytes:
    """Return the bytes of a file. `savefig` would draw the figure twice, once for the layout."""
    options: Any = {"pil_kwargs": {"compress_level": 3}} if suffix == ".png" else {}
    content, canvas, dpi = io.BytesIO(), figure.canvas, figure.dpi
    printing: Any = get_registered_canvas_class(suffix[1:])(figure)
    figure.dpi = _PNG_DPI  # Vector files may have rasterized marks.
    with matplotlib.rc_context(_REPEATABLE):
        getattr(printing, f"print_{suffix[1:]}")(content, metadata=metadata, **options)
    figure.dpi = dpi
    figure.set_canvas(canvas)
    return content.getvalue()


def _in_the_dark(color: str) -> str:
    """Return the colour for a dark page: same hue, inverted lightness."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(color))
    # Coloured lines must be bright enough. Greys need no minimum.
    least = 0.52 if max(to_rgb(color)) - min(to_rgb(color)) > 0.3 else 0.0
    return to_hex(colorsys.hls_to_rgb(hue, max(0.94 - 0.85 * lightness, least), saturation))


def svg_address(ax: Axes) -> str:
    """Return a figure as the data URL of an SVG without backgrounds, for light and dark pages."""
    figure = figure_of(ax)
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    svg = _MORE_DIGITS.sub("", _printed(figure, ".svg", _METADATA[".svg"]).decode())
    colors = sorted(set(_COLOR.findall(svg)))
    svg = _COLOR.sub(lambda color: f"var(--{color[0][1:]},{color[0]})", svg)
    dark = ";".join(f"--{color[1:]}:{_in_the_dark(color)}" for color in colors)
    rules = f"svg{{{dark}}}image{{filter:invert(.9) hue-rotate(180deg)}}"
    style = f"<style>@media screen and (prefers-color-scheme:dark){{{rules}}}</style>"
    svg = svg.replace("<defs>", f"{style}<defs>", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
