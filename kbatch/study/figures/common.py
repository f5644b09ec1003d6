"""What the figures of a study share: series, the best trial of a size, incomplete trials."""

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
from kbatch.study.decision import Decision
from kbatch.study.page import LEFT_OUT
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord, judged_column
from kbatch.training.metrics import is_fraction, metric_words

# Most batch sizes that are named below a title.
_MOST_NAMES = 15
BATCH_LABEL = "Batch size (examples per update)"


def write_conditions(
    panels: Sequence[Axes],
    studies: Sequence[Study],
    *notes: str,
    alarm: str | None = None,
    caption: bool,
) -> None:
    """Write below panels what they show, which trials are missing, and on which device they ran."""
    first, *others = (conditions(study.trials, study.environment) for study in studies)
    facts = [fact for fact in first if all(fact in other for other in others)]
    alarm = incomplete_text(studies) if alarm is None else alarm
    lost = missing_text(sum(study.missing for study in studies))
    canvas.write_caption(panels, alarm, lost, *notes, facts=facts, caption=caption)


def incomplete_text(studies: Sequence[Study]) -> str:
    """Describe which trials have no result, and why; an empty text if all have one."""
    texts = []
    for study in studies:
        ended = [trial for trial in study.trials if trial.status != "running"]
        trials = [trial for trial in ended if trial.status != "completed"]
        names, who = differing(study.trials), f"{study.name}: " if len(studies) > 1 else ""
        which = at_most([f"{trial_name(t, names)} ({t.outcome})" for t in trials])
        if trials and len(trials) == len(ended):
            texts.append(f"{who}{none_completed(study)}.")
        elif trials:
            mark = "\N{MULTIPLICATION X} Without a result:"
            texts.append(f"{mark} {who}batch size {join_words(which)}.")
    return " ".join(texts)


def none_completed(study: Study) -> str:
    counts = Counter(trial.outcome for trial in study.trials)
    return f"No trial completed: {', '.join(f'{n:,} {word}' for word, n in counts.items())}"


def missing_data(study: Study, needed: str) -> ValueError:
    """Return the error of a figure whose data no trial has."""
    completed = any(trial.status == "completed" for trial in study.trials)
    received = "Trials completed without them" if completed else none_completed(study)
    return ValueError(f"This figure needs {needed}. Received: {received}.")


def far_off(study: Study) -> list[TrialRecord]:
    """List the trials of sizes that a race tried only at a rate that does not suit them."""
    return [trial for trial, why in study.decide().left_out if why == "far_rate"]


def far_off_note(studies: Sequence[Study]) -> str:
    """Say which sizes a figure of quality leaves out; an empty text if it shows all."""
    texts = []
    for study in studies:
        if sizes := sorted({trial.batch_size for trial in far_off(study)}):
            who = f"{study.name} " if len(studies) > 1 else ""
            texts.append(f"{who}{join_words([f'{size:,}' for size in sizes])}")
    return f"Left out: batch size {', '.join(texts)}, {LEFT_OUT['far_rate']}." if texts else ""


def one_of_each_size(study: Study, trials: Iterable[TrialRecord]) -> dict[int, TrialRecord]:
    """Pick for each batch size the trial that the decision compares, or its best one."""
    compared = {trial.trial_id for trial in study.decide().trials}

    def order(trial: TrialRecord) -> tuple[Any, ...]:
        ended = trial.status == "completed"
        return trial.trial_id not in compared, not ended, -len(trial.executions), trial.rank

    found = {trial.batch_size: trial for trial in sorted(trials, key=order, reverse=True)}
    return dict(sorted(found.items()))


def write_title(
    panel: Axes, title: str, studies: Sequence[Study], sizes: Sequence[int] = ()
) -> None:
    """Write a title, and name below it several studies, or batch sizes of a single one."""
    several = len(studies) > 1
    for number, study in enumerate(studies if several else ()):
        size = study.decide().batch_size
        answer = " (no answer)" if size is None else f" (answer: batch size {size:,})"
        name = canvas.shortened(study.name, canvas.name_room(panel) - len(answer))
        draw.points(panel, [], [], *series_style(number), line="-", label=f"{name}{answer}")
    for number in () if several else range(0, len(sizes), 1 + len(sizes) // _MOST_NAMES):
        color, marker = size_color(sizes[number], sizes), series_style(number)[1]
        draw.points(panel, [], [], color, marker, line="-", label=f"{sizes[number]:,}")
    canvas.write_title(panel, title, columns=3 if several else 7, fewest=1)


def answer_text(decided: Decision) -> str:
    """Name the answer, such as "batch size 256 at 0.004"; an empty text if there is none."""
    if decided.batch_size is None:
        return ""
    rate = f" at {setting(decided.learning_rate)}" if decided.learning_rate else ""
    sure = "" if decided.certified else " (not certified)"
    return f"batch size {decided.batch_size:,}{rate}{sure}"


def quality_of(trial: TrialRecord, quality: Objective) -> Estimate[float] | None:
    """Return the metric of quality of a trial: of the objective the value that decides."""
    return trial.judged() if quality == trial.objective else trial.metric(quality.name)


def metric_title(metric: Objective) -> str:
    words = metric_words(metric.name)
    return f"{words[0].upper()}{words[1:]}"


def end_axis(panel: Axes, metric: Objective, values: Sequence[float]) -> None:
    """End the y axis at the values; make it logarithmic for a loss that falls tenfold."""
    low, high = min(values), max(values)
    if metric.direction == "min" and 0 < 10 * low < high:
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
    judged: Objective | None = None,  # The objective whose values that decide are shown.
) -> None:
    """Label the y axis with a metric and keep its range; that of a fraction is 0 to 1."""
    words = metric_title(metric)
    words += ", judged" if metric == judged and judged_column(metric) else ""
    better = "higher is better" if metric.direction == "max" else "lower is better"
    fraction = "0 to 1, " if is_fraction(metric.name) else ""
    panel.set_ylabel(f"{words}\n({fraction}{better})", parse_math=False)
    low, high = panel.get_ylim()
    if is_fraction(metric.name) and values and 0 <= min(values) <= max(values) <= 1:
        # Half a mark stays free at the ends.
        low, high = max(low, 0.0), min(high, 1.0)
        margin = 0.05 * (high - low)
        ticks = [tick for tick in panel.get_yticks() if low - 1e-9 <= tick <= high + 1e-9]
        low, high = (low or -margin), (high + margin if high == 1 else high)
        panel.set_yticks(ticks)
    panel.set_ylim(low, high)


BARS = "Bars: 95 % interval over training runs"


def bars_text(trials: Sequence[TrialRecord], quality: Objective | None) -> str:
    """Describe the bars of the throughput of trials, and of a metric; empty if there is none."""
    kinds: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for trial in trials:
        several = len(trial.executions) >= FEWEST_VALUES
        of_time = BARS if several else "quartiles of the timing windows"
        over = BARS if several else "95 % over validation examples"
        value = quality and quality_of(trial, quality)
        measured = (of_time, trial.throughput), (over, value)
        kinds[several] |= {text: None for text, found in measured if found and found.ends}
    who = "of one or two runs, " if kinds[True] else "Bars: "
    few = [f"{who}{' and '.join(kinds[False])}"] if kinds[False] else []
    return f"{'; '.join([*kinds[True], *few])}." if kinds[True] or few else ""
