"""Format numbers, times, sizes of memory, machines and texts for people to read."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from datetime import datetime

from kbatch.analysis.intervals import Estimate
from kbatch.records.machine import LIBRARIES, EnvironmentRecord


def format_number(value: float, digits: int = 3) -> str:
    """Format a measured number with this many significant digits, such as 12,300 or 0.972."""
    if value == 0:
        return "0"
    # Round first, because rounding may give the next power of ten: 999.7 becomes 1,000.
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -5 < exponent < 12:
        return f"{rounded:.{digits - 1}e}"
    return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"


def in_brackets(interval: Estimate[float | None] | None, digits: int = 3) -> str:
    """Format an interval as " (low to high)", or as an empty text if there is none."""
    ends = interval and interval.ends
    return f" ({' to '.join(format_number(end, digits) for end in ends)})" if ends else ""


def speed_text(speed: Estimate[float] | float, than: str = "", digits: int = 3) -> str:
    """Format a ratio of speeds, such as "1.6 times as fast as A" or "14.5 times slower than A"."""
    ratio = speed if isinstance(speed, Estimate) else Estimate(speed)
    if not (faster := ratio.value >= 1):
        low, high = (1 / end if end else None for end in (ratio.high, ratio.low))
        ratio = Estimate(1 / ratio.value, low, high)
    words = f"as fast as {than}" if faster else f"slower than {than}"
    number = format_number(ratio.value, digits) + in_brackets(ratio, digits)
    return f"{number} times {words if than else 'as fast' if faster else 'slower'}"


def setting(value: float) -> str:
    """Format a chosen number, such as a learning rate of 0.001, without trailing zeros."""
    mantissa, mark, exponent = format_number(value).partition("e")
    return (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa) + mark + exponent


def percent(share: float) -> str:
    """Format a share from 0 to 1 in percent, such as "25 %" or "<1 %"."""
    return "<1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def duration_text(*seconds: float) -> str:
    """Format a duration or a range of durations, such as "41 s" or "12 to 19 min"."""
    unit_s, unit = time_unit(seconds[-1])
    numbers = [duration_s / unit_s for duration_s in seconds]
    texts = dict.fromkeys(f"{n:.0f}" if n >= 10 else f"{n:.2g}" for n in numbers)
    return f"{' to '.join(texts)} {unit}"


def left_text(seconds: float) -> str:
    """Format the time left with two digits, such as "31 min left"."""
    unit_s, unit = time_unit(float(f"{seconds:.2g}"))
    number = f"{float(f'{seconds / unit_s:.2g}'):,g}"
    return f"{number} {unit} left" if seconds >= 1 else "less than 1 s left"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a suitable unit for a duration: its length in seconds, and its name."""
    units = ((3600.0, "h"), (60.0, "min"))
    return next((unit for unit in units if seconds >= 2 * unit[0]), (1.0, "s"))


def memory_text(size_bytes: float) -> str:
    """Format a size of memory in a suitable binary unit, such as "1.50 GiB"."""
    power = min(4, max(0, (max(1, int(size_bytes)).bit_length() - 1) // 10))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    size = size_bytes / 2 ** (10 * power)
    return f"{size:.0f} {unit}" if power == 0 else f"{format_number(size)} {unit}"


def join_words(words: Iterable[str]) -> str:
    """Join words as in a sentence, such as "16, 32 and 64"."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def at_most(names: Sequence[str]) -> list[str]:
    """Return the first five names and, if there are more, a text such as "7 more"."""
    more = len(names) - 5
    return [*names[:5], *([f"{more:,} more"] if more > 0 else [])]


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 trial" or "1,200 trials"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def count_range(numbers: Iterable[int], noun: str) -> str:
    """Format the range of several counts, such as "6 to 9 rounds"."""
    ordered = sorted(numbers)
    low, high = ordered[0], ordered[-1]
    return pluralize(low, noun) if low == high else f"{low:,} to {pluralize(high, noun)}"


def one_line(text: str) -> str:
    """Put a message onto one line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:299]}…"


def environment_texts(environment: EnvironmentRecord | None) -> dict[str, str]:
    """Return facts about machine and software by name, or none if they were not recorded."""
    if environment is None:
        return {}
    started = environment.created_at
    with contextlib.suppress(ValueError):  # A text that is no time is shown unchanged.
        at = datetime.fromisoformat(started)
        started = f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}".strip()
    return {
        "Started": started,
        "Device": environment.device,
        "Processor": f"{environment.cpu}, {environment.cpu_count} usable",
        "Host memory": memory_text(environment.memory_bytes),
        "Load average at the start": f"{environment.load_average:.2f}",
        "Platform": environment.platform,
        **environment.versions,
    }


def where_measured(environment: EnvironmentRecord | None) -> list[str]:
    """List the device and the versions of the libraries that computed, as in `"Keras 3.15.1"`."""
    if environment is None:
        return ["n/a (device not recorded)"]
    known = (f"{LIBRARIES[n]} {v}" for n, v in environment.versions.items() if n in LIBRARIES)
    return [environment.device, *known]
