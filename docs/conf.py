"""Sphinx's settings: `make docs` builds the site into build/docs."""

import dataclasses
import inspect
import re

from sphinx.util import logging

import kbatch

# The documented modules import TensorFlow, which writes lines to stderr when it starts.
with kbatch.quiet_start():
    import tensorflow  # noqa: F401

project = "kbatch"
release = version = kbatch.__version__
copyright = "the kbatch authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Docstrings mark code with single back-ticks.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_heading_anchors = 3

html_theme = "furo"
html_title = "kbatch"
html_show_sourcelink = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]


# Replaces colons while napoleon runs, which would take the text before one for a type.
HIDDEN_COLON = "\0"


def prepare(app, kind, name, thing, options, lines):
    """Keep |G|^2 from being read as a substitution, and a property's sentence as its type."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = line.replace("|", r"\|")
    if kind in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(":", HIDDEN_COLON)


def restore(app, kind, name, thing, options, lines):
    """Bring the colons back."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


DOCUMENTED = set()


def undescribed(thing, lines):
    """Return the parameters of a function or a class that `Args:` does not describe."""
    function = vars(thing).get("__init__") if inspect.isclass(thing) else thing
    if dataclasses.is_dataclass(thing) or not callable(function):
        return []  # The fields of a record are described one by one.
    # The lines of the section: blank, or indented.
    section = re.search(r"^Args:\n((?:[ ].*\n|\n)*)", "\n".join([*lines, ""]), re.MULTILINE)
    names = re.findall(r"^ {4}([*\w, ]+):", section[1], re.MULTILINE) if section else []
    described = {name for group in names for name in re.findall(r"\w+", group)}
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name not in described | {"self", "cls"}]


def check_texts(app, kind, name, thing, options, lines):
    """Warn, which fails the build, about a parameter without a description."""
    DOCUMENTED.add(name)
    if kind in ("function", "method", "class", "exception"):
        for missing in undescribed(thing, lines):
            logging.getLogger(__name__).warning("%s: describe `%s`", name, missing)


def check_names(app, error):
    """Warn about public names that no page documents."""
    names = {f"kbatch.{name}" for name in kbatch.__all__} - {"kbatch.analysis"}
    for name in sorted(names - DOCUMENTED) if error is None else ():
        logging.getLogger(__name__).warning("%s: document it in docs/reference", name)


def setup(app):
    """Register what this file adds to Sphinx, before napoleon and after it."""
    app.connect("autodoc-process-docstring", check_texts, priority=300)
    app.connect("autodoc-process-docstring", prepare, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("build-finished", check_names)
