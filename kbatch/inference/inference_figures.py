"""The figures of an inference profile's report, those for which it has the data."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kbatch.document.content import Figure
from kbatch.document.number_text import listed
from kbatch.inference.figures.common import inference_alt_text, inference_info
from kbatch.inference.inference_record import InferenceProfile


class _Offer(NamedTuple):
    """A figure that a profile may have.

    Attributes:
        name: Name of its module, and of its function, after `inference_`.
        title: What it shows.
        data: The function of its module that fails without the data.
    """

    name: str
    title: str
    data: str


_OFFERS = (
    _Offer("throughput", "Throughput and time of a batch", "inference_info"),
    _Offer("operating_curve", "Throughput against the time of a batch", "inference_info"),
    _Offer("tails", "Tails of the latency", "tail_points"),
    _Offer("paths", "Call paths against the first one", "path_ratios"),
    _Offer("memory", "Memory by batch size", "memory_series"),
    _Offer("noise", "Scatter of the rounds", "noise_points"),
)


def inference_figures(profile: InferenceProfile) -> tuple[Figure, ...]:
    """Offers the figures for which a profile has the data."""
    figures = []
    for offer in _OFFERS:
        module = importlib.import_module(f"kbatch.inference.figures.{offer.name}")
        if _has_data(getattr(module, offer.data), profile):
            figures.append(_figure(offer, module, profile))
    return tuple(figures)


def _has_data(data: Callable[[InferenceProfile], object], profile: InferenceProfile) -> bool:
    try:
        data(profile)
    except ValueError:  # The error tells a caller what to measure; a report leaves it out.
        return False
    return True


def _figure(offer: _Offer, module: Any, profile: InferenceProfile) -> Figure:
    return Figure(
        name=f"inference-{offer.name.replace('_', '-')}",
        title=offer.title,
        height_in=module.HEIGHT_IN,
        draw=functools.partial(getattr(module, f"plot_inference_{offer.name}"), profile),
        alt_text=_alt_text(offer, profile),
        shape="alone" if offer is _OFFERS[0] else "small",
    )


def _alt_text(offer: _Offer, profile: InferenceProfile) -> str:
    if offer.data == "inference_info":
        return inference_alt_text(inference_info(profile))
    series = listed(f"{path} under {policy}" for path, policy in profile.series)
    return f"A chart: {offer.title.lower()}, for {series}. The table of timings has the numbers."
