"""What to set besides the learning rate."""

from kbatch.document.number_text import listed
from kbatch.recommendation.recommendation_record import Recommendation
from kbatch.study.followed_settings import SETTING_NAMES, followed_value


def settings_line(recommendation: Recommendation) -> list[str]:
    """Say what to set besides the learning rate, nothing where the size was trained without."""
    size = recommendation.batch_size
    for check in recommendation.checks:
        scaling = check.scaling
        if check.batch_size != size or scaling is None:
            continue
        found = {name: followed_value(scaling, name) for name in scaling.follow_batch_size or ()}
        parts = [f"{SETTING_NAMES[name]} to {value}" for name, value in found.items() if value]
        if parts:
            return [f"Set {listed(parts)} as well: batch size {size:,} was trained like this."]
    return []
