"""Sphinx's settings: `make docs` builds the site into build/docs."""

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


def setup(app):
    """Registers what this file adds to Sphinx, before napoleon and after it."""
    app.connect("autodoc-process-docstring", prepare, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
