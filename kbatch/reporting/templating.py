"""The templates of reports."""

import re

import jinja2

# Characters that Markdown or the HTML inside it would take for markup.
_MARKDOWN_MARKUP = re.compile(r"([\\`*\[\]<>|])")
_NUMBER_WITH_UNIT = re.compile(r"(?<=\d) (?=%|[KMGT]iB|ms\b|s\b|samples/s)")


def templates() -> jinja2.Environment:
    """Gives the templates, in which an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.reporting"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = plain
    environment.filters["glued"] = glued
    return environment


def glued(text: str) -> str:
    """Keeps a number on the line of its unit."""
    return _NUMBER_WITH_UNIT.sub("\N{NO-BREAK SPACE}", text)


def plain(text: str) -> str:
    """Keeps Markdown from reading markup into a text."""
    return _MARKDOWN_MARKUP.sub(r"\\\1", " ".join(text.split()))
