"""What a notebook shows of a record."""

import importlib

# The one door from a record upwards: looked up when a notebook asks, so that a record is read
# without what draws and writes; `tests/test_layout.py` knows it by name.
_WRITER = "kbatch.report.notebook_html"


class ShownRecord:
    """A record that Jupyter, Colab and others show as HTML.

    They ask the object itself, by its method `_repr_html_`; the page is written by `kbatch.report`.
    """

    def _repr_html_(self) -> str | None:
        return importlib.import_module(_WRITER).notebook_html(self)
