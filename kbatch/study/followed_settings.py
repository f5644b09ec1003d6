"""Which settings followed the batch size, and to which values, in a sentence."""

from collections.abc import Iterable

from kbatch.analysis.learning_rate_records import LearningRateScaling
from kbatch.analysis.timescales import FOLLOWERS
from kbatch.document.number_text import listed, setting

SETTING_NAMES = {
    "beta_2": "`beta_2`",
    "weight_decay": "weight decay",
    "batch_norm_momentum": "BatchNormalization's momentum",
}


def followed_text(scalings: Iterable[LearningRateScaling | None]) -> str:
    """Say what followed the batch size besides the learning rate, nothing where nothing did.

    Args:
        scalings: How the settings of each training followed its batch size, None if not known.
    """
    known = [scaling for scaling in scalings if scaling and scaling.follow_batch_size]
    if not known:
        return ""
    first = min(known, key=lambda scaling: scaling.batch_size)
    last = max(known, key=lambda scaling: scaling.batch_size)
    pairs = {name: (followed_value(first, name), followed_value(last, name)) for name in FOLLOWERS}
    parts = [
        f"{SETTING_NAMES[name]} ({low} to {high})"
        for name, (low, high) in pairs.items()
        if low and high and low != high
    ]
    if not parts:
        return ""
    return (
        f"Settings that follow the batch size, from {first.batch_size:,} to {last.batch_size:,}: "
        f"{listed(parts)}."
    )


def followed_value(scaling: LearningRateScaling, name: str) -> str:
    """Format one of the settings that follow, empty where it is not known."""
    if name == "batch_norm_momentum":
        momenta = scaling.batch_norm_momenta
        return listed(map(setting, momenta)) if momenta else ""
    value = scaling.beta_2 if name == "beta_2" else scaling.weight_decay
    return "" if value is None else setting(value)
