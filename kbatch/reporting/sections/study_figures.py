"""The figures of a study's report, those for which it has the data."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kbatch.records.study import Study
from kbatch.reporting.caveat import Caveat
from kbatch.reporting.sections.content import Figure
from kbatch.reporting.sections.marks import notes_about
from kbatch.reporting.tables import Table


class _Offer(NamedTuple):
    """A figure that a study may have.

    Attributes:
        name: Name of its module, and of its function after `plot_`.
        title: What it shows.
        columns: Columns of the table whose numbers it shows.
        shown: Whether a study has the data.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    shown: Callable[[Study], bool] = lambda study: True


# That of the decision first.
_OFFERS = (
    _Offer(
        "trials",
        "Throughput and quality by batch size",
        ("batch_size", "samples_per_second", "quality"),
    ),
)


def study_figures(study: Study, caveats: Sequence[Caveat], table: Table) -> tuple[Figure, ...]:
    """Offers the figures for which a study has the data.

    Args:
        study: A study with at least one trial.
        caveats: What limits the conclusions from it.
        table: Its trials, whose notes have the marks.
    """
    return tuple(_figure(offer, study, caveats, table) for offer in _OFFERS if offer.shown(study))


def _figure(offer: _Offer, study: Study, caveats: Sequence[Caveat], table: Table) -> Figure:
    module = importlib.import_module(f"kbatch.reporting.figures.{offer.name}")
    return Figure(
        name=offer.name.replace("_", "-"),
        title=offer.title,
        height_in=module.HEIGHT_IN,
        draw=functools.partial(getattr(module, f"plot_{offer.name}"), study),
        alt_text=module.alt_text(getattr(module, f"{offer.name}_info")(study)),
        notes=notes_about(caveats, table, offer.columns),
    )
