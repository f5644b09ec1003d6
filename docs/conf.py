"""Sphinx's settings: `make docs` builds the site into build/docs."""

import dataclasses
import inspect
import re

from sphinx.util import logging

import kbatch

# What is documented imports TensorFlow, which writes lines to stderr at its start.
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


# Stands for a colon while napoleon looks for the type that may be before one.
HIDDEN_COLON = "\0"


def prepare(app, kind, name, thing, options, lines):
    """Keeps |G|^2 from being read as a substitution, and a property's sentence as its type."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = line.replace("|", r"\|")
    if kind in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(":", HIDDEN_COLON)


def restore(app, kind, name, thing, options, lines):
    """Brings the colons back."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


DOCUMENTED = set()


def undescribed(name, thing, text):
    """Return the parameters that `Args:` does not describe.

    In methods, and in the functions of `kbatch.analysis`, a sentence may name them instead.
    """
    function = vars(thing).get("__init__") if inspect.isclass(thing) else thing
    if dataclasses.is_dataclass(thing) or not callable(function):
        return []  # The fields of a record are described one by one.
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}([*\w, ]+):", section[1] if section else "", re.MULTILINE)
    described = set(re.findall(r"\w+", " ".join(entries)))
    if inspect.isfunction(thing) and name.count(".") > 1:
        described |= set(re.findall(r"`(\w+)`", text))
    return [name for name in inspect.signature(function).parameters if name not in described]


def check_texts(app, kind, name, thing, options, lines):
    """Warn about a public parameter without a description, which fails the build."""
    DOCUMENTED.add(name)
    public = name.split(".")[1] in kbatch.__all__
    if public and kind in ("function", "method", "class"):
        text = "\n".join([*lines, ""])
        for parameter in {*undescribed(name, thing, text)} - {"self", "cls"}:
            logging.getLogger(__name__).warning("%s: describe `%s` in `Args:`", name, parameter)


def check_names(app, env):
    """Warn about public names that no page documents."""
    names = {f"kbatch.{name}" for name in kbatch.__all__} - {"kbatch.analysis"}
    for name in sorted(names - DOCUMENTED):
        logging.getLogger(__name__).warning("%s: document it in docs/reference", name)


def setup(app):
    """Register what this file adds to Sphinx, before napoleon and after it."""
    app.connect("autodoc-process-docstring", check_texts, priority=300)
    app.connect("autodoc-process-docstring", prepare, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("env-check-consistency", check_names)
