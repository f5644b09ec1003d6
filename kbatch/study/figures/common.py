"""Texts, axes and choices of trials that the figures of a study share."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from kbatch.analysis.intervals import FEWEST_VALUES, Estimate
from kbatch.page.numbers import at_most, join_words, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import series_style, size_color
from kbatch.plotting.draw import plain_log_labels
from kbatch.study.compared_trials import conditions, differing, missing_text, trial_name
from kbatch.study.comparison import Comparison
from kbatch.study.decision import Decision
from kbatch.study.page import LEFT_OUT
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord, judged_column
from kbatch.training.metrics import is_fraction, metric_words

# Most batch sizes in the legend below a title.
_MOST_NAMES = 15
BATCH_LABEL = "Batch size (examples per update)"
# Note for figures of several studies. The legend names the recommended sizes.
RINGS = "Rings: recommended batch sizes."


def write_conditions(
    panels: Sequence[Axes],
    studies: Sequence[Study],
    *notes: str,
    alarm: str | None = None,
    caption: bool,
    **texts: str,
) -> None:
    """Write notes, missing trials and common conditions of the studies below panels.

    The default result in the alternative text is the answer of the studies.
    """
    first, *others = (conditions(study.trials, study.environment) for study in studies)
    facts = [fact for fact in first if all(fact in other for other in others)]
    alarm = incomplete_text(studies) if alarm is None else alarm
    missing = missing_text(sum(study.missing for study in studies))
    answer = f"{studies[0].answer.removesuffix('.')}{doubt(studies[0].decide())}."
    texts = {"result": Comparison(tuple(studies)).answer if others else answer} | texts
    canvas.write_caption(panels, alarm, missing, *notes, facts=facts, caption=caption, **texts)


def incomplete_text(studies: Sequence[Study], *, diverged: bool = True) -> str:
    """Name the trials without a result, with the reasons. Empty if each trial has a result."""
    texts, parts = [], []
    for study in studies:
        shown = [t for t in study.trials if diverged or not any(e.diverged for e in t.executions)]
        ended = [trial for trial in shown if trial.status != "running"]
        incomplete = [trial for trial in ended if trial.status != "completed"]
        names, prefix = differing(study.trials), f"{study.name}: " if len(studies) > 1 else ""
        if incomplete and len(incomplete) == len(ended):
            texts.append(f"{prefix}{none_completed(study)}.")
        elif incomplete:
            sizes = at_most([f"{trial_name(t, names)} ({t.outcome})" for t in incomplete])
            parts.append(f"{prefix}batch size {join_words(sizes)}")
    mark = "\N{MULTIPLICATION X} Without a result:"
    return " ".join([*texts, *([f"{mark} {'; '.join(parts)}."] if parts else [])])


def none_completed(study: Study) -> str:
    counts = Counter(trial.outcome for trial in study.trials)
    return f"No trial completed: {', '.join(f'{n:,} {word}' for word, n in counts.items())}"


def missing_data(study: Study, needed: str) -> ValueError:
    """Return the error for a figure if no trial has the data that it needs."""
    completed = any(trial.status == "completed" for trial in study.trials)
    received = "completed trials without these data" if completed else none_completed(study)
    return ValueError(f"This figure needs {needed}. Received: {received}.")


def far_off(study: Study) -> list[TrialRecord]:
    """List the trials of sizes that a race tried only at a rate far from the best one."""
    return [trial for trial, why in study.decide().left_out if why == "far_rate"]


def far_off_note(studies: Sequence[Study]) -> str:
    """Name the sizes that a figure of quality leaves out; empty if there are none."""
    texts = []
    for study in studies:
        if sizes := sorted({trial.batch_size for trial in far_off(study)}):
            suffix = f" of {study.name}" if len(studies) > 1 else ""
            texts.append(f"{join_words([f'{size:,}' for size in sizes])}{suffix}")
    return f"Left out: batch size {', '.join(texts)}, {LEFT_OUT['far_rate']}." if texts else ""


def one_of_each_size(study: Study, trials: Iterable[TrialRecord]) -> dict[int, TrialRecord]:
    """Choose for each batch size the trial that the decision compares, or its best one."""
    compared = {trial.trial_id for trial in study.decide().trials}

    def order(trial: TrialRecord) -> tuple[Any, ...]:
        completed = trial.status == "completed"
        return trial.trial_id not in compared, not completed, -len(trial.executions), trial.rank

    chosen = {trial.batch_size: trial for trial in sorted(trials, key=order, reverse=True)}
    return dict(sorted(chosen.items()))


def write_title(
    panel: Axes, title: str, studies: Sequence[Study], sizes: Sequence[int] = ()
) -> None:
    """Write a title with a legend of the studies, or of the batch sizes of a single study."""
    several = len(studies) > 1
    for number, study in enumerate(studies if several else ()):
        size = study.decide().batch_size
        answer = "no answer" if size is None else f"answer: batch size {size:,}"
        answer = f"({answer}{doubt(study.decide(), ', not certain')})"
        # A line of the legend does not end within these words.
        answer = "" if canvas.is_low(panel) else re.sub("(?<!,) ", "\N{NO-BREAK SPACE}", answer)
        name = canvas.shortened(study.name, 2 * canvas.name_room(panel) - 2)
        draw.points(
            panel, [], [], *series_style(number), line="-", label=f"{name} {answer}".strip()
        )
    for number in () if several else range(0, len(sizes), 1 + len(sizes) // _MOST_NAMES):
        color, marker = size_color(sizes[number], sizes), series_style(number)[1]
        draw.points(panel, [], [], color, marker, line="-", label=f"{sizes[number]:,}")
    canvas.write_title(panel, title, columns=3 if several else 7, fewest=1)


def answer_text(decision: Decision) -> str:
    """Name the answer, such as "batch size 256, learning rate 0.004"; empty if there is none."""
    if decision.batch_size is None:
        return ""
    rate = f", learning rate {setting(decision.learning_rate)}" if decision.learning_rate else ""
    return f"batch size {decision.batch_size:,}{rate}{doubt(decision)}"


def doubt(decision: Decision, words: str = " (not certain)") -> str:
    """Return the words if an answer is not certain; "" if there was nothing to choose from."""
    alone = len(decision.page.rows) < 2 and not decision.left_out
    return "" if decision.certified or decision.batch_size is None or alone else words


def quality_of(trial: TrialRecord, quality: Objective) -> Estimate[float] | None:
    """Return a trial's value of the quality metric, judged if this is the objective."""
    return trial.judged() if quality == trial.objective else trial.metric(quality.name)


def metric_title(metric: Objective) -> str:
    words = metric_words(metric.name)
    return f"{words[0].upper()}{words[1:]}"


def end_axis(panel: Axes, metric: Objective, values: Sequence[Estimate[float]]) -> None:
    """End the y axis at the intervals. Make it logarithmic for a loss that varies tenfold."""
    lowest, highest = (choose(value.value for value in values) for choose in (min, max))
    ends = [end for value in values for end in value.ends or (value.value,)]
    low, high = min(ends), max(ends)
    if metric.direction == "min" and 0 < 10 * lowest < highest:
        low = max(low, lowest / 10)  # A logarithmic axis cannot show an interval that includes 0.
        panel.set_yscale("log")
        margin = (high / low) ** 0.08
        panel.set_ylim(low / margin, high * margin)
        plain_log_labels(panel.yaxis)
    else:
        margin = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
        panel.set_ylim(low - margin, high + margin)


def quality_axis(
    panel: Axes,
    metric: Objective,
    values: Sequence[float],
    *,
    judged: Objective | None = None,  # The objective, if the judged values are shown.
) -> None:
    """Label the y axis with a metric, and limit the axis of a fraction to 0 to 1."""
    words = metric_title(metric)
    words += ", judged" if metric == judged and judged_column(metric) else ""
    better = "higher is better" if metric.direction == "max" else "lower is better"
    fraction = "0 to 1, " if is_fraction(metric.name) else ""
    panel.set_ylabel(f"{words}\n({fraction}{better})", parse_math=False)
    low, high = panel.get_ylim()
    if is_fraction(metric.name) and values and 0 <= min(values) <= max(values) <= 1:
        # Marks at the ends are not cut.
        low, high = max(low, 0.0), min(high, 1.0)
        margin = 0.05 * (high - low)
        ticks = [tick for tick in panel.get_yticks() if low - 1e-9 <= tick <= high + 1e-9]
        low, high = (low or -margin), (high + margin if high == 1 else high)
        panel.set_yticks(ticks[:: 1 + len(ticks) // (1 + canvas.label_rows(panel))])
    panel.set_ylim(low, high)


BARS = "Bars: 95 % interval over training runs"


def bars_text(trials: Sequence[TrialRecord], quality: Objective | None) -> str:
    """Describe the bars of throughput and quality; empty if there are none."""
    over_runs, of_few_runs = False, dict[str, None]()
    for trial in trials:
        intervals = trial.throughput, quality and quality_of(trial, quality)
        if len(trial.executions) >= FEWEST_VALUES:
            over_runs |= any(interval and interval.ends for interval in intervals)
        else:
            texts = "quartiles of throughput", "95 % interval over validation examples"
            pairs = zip(texts, intervals, strict=True)
            of_few_runs |= dict.fromkeys(text for text, value in pairs if value and value.ends)
    few = " and ".join(of_few_runs)
    if over_runs:
        return f"{BARS}; for points with one or two runs: {few}." if few else f"{BARS}."
    return f"Bars: {few}." if few else ""
