"""The templates of reports."""

import re

import jinja2
from markupsafe import Markup, escape

# Characters that Markdown or the HTML inside it would take for markup.
_MARKDOWN_MARKUP = re.compile(r"([\\`*\[\]<>|])")
_CODE = re.compile(r"`([^`]+)`")
_RANGE = re.compile(r"\(?[\d.,]+ (?:±|to) [\d.,]+\)?")
_NUMBER_WITH_UNIT = re.compile(r"(?<=\d) (?=%|[KMGT]iB|ms\b|s\b|samples/s)")


def templates() -> jinja2.Environment:
    """Gives the templates, in which an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.report"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = plain
    environment.filters["glued"] = glued
    environment.filters["prose"] = prose
    environment.filters["in_cell"] = in_cell
    environment.filters["plain_prose"] = plain_prose
    return environment


def glued(text: str) -> str:
    """Keeps a number on the line of its unit."""
    return _NUMBER_WITH_UNIT.sub("\N{NO-BREAK SPACE}", text)


def in_cell(text: str) -> Markup:
    """Lets a long name break at underscores, and keeps a range or a number with its ± together."""
    broken = str(escape(text)).replace("_", "_<wbr>")
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', broken))


def prose(text: str) -> Markup:
    """Writes a sentence as HTML: what stands between back-ticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(glued(text)))))


def plain_prose(text: str) -> str:
    """Writes a sentence as Markdown, in which back-ticks mark code too."""
    text, parts, end = " ".join(text.split()), [], 0
    for code in _CODE.finditer(text):
        parts += [_escaped(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _escaped(text[end:])])


def plain(text: str) -> str:
    """Keeps Markdown from reading markup into a text."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return _MARKDOWN_MARKUP.sub(r"\\\1", text)
