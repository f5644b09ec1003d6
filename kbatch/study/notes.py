"""Notes on a study: caveats, the noise scale, a search by goodput, followed settings."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kbatch.analysis.learning_rate import FOLLOWERS, LearningRateScaling
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import counted, listed, percent, readable, setting
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.study import SizeDecision, Study
from kbatch.study.trial import TrialRecord


class Caveat(NamedTuple):
    """What limits the conclusions from a study.

    Attributes:
        label: The same in a few words, for a caption.
        text: A sentence or two.
        columns: Names of the table's columns whose numbers it concerns, none where it concerns
            what is not there.
        trial_ids: The trials whose numbers it concerns, none for all of them.
    """

    label: str
    text: str
    columns: tuple[str, ...] = ()
    trial_ids: tuple[str, ...] = ()


class Concerned(NamedTuple):
    """The trials that a caveat concerns.

    Attributes:
        sizes: Their batch sizes in words.
        trial_ids: keras-tuner's identifiers.
    """

    sizes: str
    trial_ids: tuple[str, ...]


def concerned(
    trials: Iterable[TrialRecord], holds: Callable[[TrialRecord], bool]
) -> Concerned | None:
    """Find the trials of which something holds, None where there are none."""
    found = [trial for trial in trials if holds(trial)]
    if not found:
        return None
    sizes = dict.fromkeys(f"{trial.batch_size:,}" for trial in found)
    plural = "batch sizes" if len(sizes) > 1 else "batch size"
    return Concerned(f"{plural} {listed(sizes)}", tuple(trial.trial_id for trial in found))


NOISE_FOOTNOTE = (
    "Noise scale: in examples, of the late half of training, with its 95 % interval; batches far "
    "above it save hardly any updates."
)


def noise_scale_text(scale: NoiseScale) -> str:
    """Write a noise scale with its interval, or what is known of an unresolved one."""
    if scale.value is not None and scale.interval is not None:
        interval = scale.interval
        bounds = f"{readable(interval.low, 2)} to {readable(interval.high, 2)}"
        return f"{readable(scale.value, 2)} ({bounds})"
    if scale.at_least:
        return f"n/a (unresolved: at least {readable(scale.at_least, 2)})"
    return "n/a (unresolved)"


def noise_caveats(study: Study) -> tuple[Caveat, ...]:
    """Describe how far the noise scale may be trusted, nothing where none was measured."""
    measured = [trial for trial in study.trials if trial.noise_scale is not None]
    if not measured:
        return ()
    optimizers = dict.fromkeys(e.optimizer for trial in measured for e in trial.executions)
    others = [name for name in optimizers if name not in (None, "SGD")]
    found = [
        Caveat(
            "noise scale",
            "The noise scale is that of the weights that each trial came to, and grows while a "
            "model learns: it tells the order of a useful batch size, not a bound.",
            ("noise_scale",),
        )
    ]
    if others:
        names = listed(map(str, others))
        found.append(
            Caveat(
                f"noise scale under {names}",
                f"The noise scale is derived for SGD. Whether it tells a useful batch size under "
                f"{names} is disputed: Merrill et al. (2025, arXiv:2505.23971) train on from one "
                "checkpoint at several batch sizes instead. Trials of several sizes to one target "
                "compare them directly.",
                ("noise_scale",),
            )
        )
    return tuple(found)


def decision_text(decision: SizeDecision) -> str:
    """Word a decision in a sentence."""
    size, best, rival = decision.batch_size, decision.best, decision.rival
    match decision.kind:
        case "pilot":
            text = f"Batch size {size} comes first: it suits most noise scales."
        case "given":
            text = (
                f"Batch size {size} comes first: it is the base batch size, whose noise scale the "
                "learning-rate rule uses."
            )
        case "no target yet":
            text = f"Batch size {size} comes next: no trial has come to the target yet."
        case "gain":
            text = (
                f"Batch size {size} comes next: batch size {rival} is more than 5 % better than "
                f"{best} with a probability of {percent(decision.probability or 0.0)}."
            )
        case "separated":
            text = (
                f"Stopped: no other batch size is likely to be as good as {best}; {rival} is more "
                f"than 5 % better with a probability of {percent(decision.probability or 0.0)}."
            )
        case "tie":
            text = (
                f"Stopped: other batch sizes may be as good as {best}, and are hardly better: "
                f"{rival} is by more than 5 % with a probability of "
                f"{percent(decision.probability or 0.0)}."
            )
        case _:
            none = "" if best else " None came to the target."
            text = (
                "Stopped: each batch size was tried, or is larger than one that could not be "
                f"trained.{none}"
            )
    others = [f"{name} {value}" for name, value in decision.hyperparameters.items()]
    return f"{text[:-1]} ({listed(others)})." if others else text


def goodput_caveats(study: Study) -> tuple[Caveat, ...]:
    """Describe which sizes a search by goodput left out, and why; nothing of other searches."""
    record = study.goodput
    if record is None:
        return ()
    tried = {trial.batch_size for trial in study.trials}
    left = [f"{size:,}" for size in record.batch_sizes if size not in tried]
    texts = [decision_text(d) for d in record.decisions if d.batch_size is None]
    if left:
        texts.insert(
            0,
            f"Strategy goodput: {counted(len(tried), 'batch size')} of {len(record.batch_sizes)} "
            f"had trials; what is known of {listed(left)} is the model's, from their step times "
            "and the noise scale.",
        )
    if record.extrapolated:
        sizes = listed(f"{size:,}" for size in record.extrapolated)
        texts.append(f"Batches of {sizes} were not timed: a line tells their step time.")
    return tuple(Caveat("sizes left out", text) for text in texts)


# Validation so far below training is more than a model usually fits its training data too well.
_FAR_BELOW = 0.1
# Before so many averaging times an average still holds some of what it began with: exp(-5) = 0.7 %.
_AVERAGING_TIMES = 5


class _Lag(NamedTuple):
    below: float
    training: float
    validation: float
    updates: int
    memory: float


def lagging_caveats(study: Study) -> Iterator[Caveat]:
    """List the trials whose validation accuracy shows lagging statistics, not their training."""
    found = concerned(study.trials, lambda trial: _lag_of(trial) is not None)
    if found is None:
        return
    lags = [(lag, trial) for trial in study.trials if (lag := _lag_of(trial)) is not None]
    most, trial = max(lags, key=lambda pair: pair[0].below)
    where = f" at {trial.batch_size:,}" if len(lags) > 1 else ""
    yield Caveat(
        "lagging statistics",
        f"Training accuracy is far above validation accuracy at {found.sizes} "
        f"({readable(most.training)} and {readable(most.validation)}{where}), and "
        f"BatchNormalization's moving statistics lag: {counted(most.updates, 'update')} came, and "
        f"the statistics average over the last {readable(most.memory)}, 1 / (1 - momentum). Before "
        "you compare these sizes, train for more updates or lower the momentum of the layers.",
        ("quality",),
        found.trial_ids,
    )


def _lag_of(trial: TrialRecord) -> _Lag | None:
    lags = [lag for e in trial.executions if (lag := _lag(e)) is not None]
    return max(lags, default=None)


def _lag(execution: ExecutionRecord) -> _Lag | None:
    momenta = execution.scaling.batch_norm_momenta if execution.scaling else None
    slowest = max(momenta or (0.0,))
    updates = execution.updates
    if not (execution.epochs and updates and 0 < slowest < 1):
        return None
    memory = 1 / (1 - slowest)
    last = execution.epochs[-1]
    pairs = [
        (training, validation)
        for name in last.metrics
        if "acc" in name
        and (training := last.finite(name)) is not None
        and (validation := last.finite(f"val_{name}")) is not None
    ]
    if not pairs or updates >= _AVERAGING_TIMES * memory:
        return None
    training, validation = max(pairs, key=lambda pair: pair[0] - pair[1])
    below = training - validation
    return _Lag(below, training, validation, updates, memory) if below > _FAR_BELOW else None


SETTING_NAMES = {
    "beta_2": "`beta_2`",
    "weight_decay": "weight decay",
    "batch_norm_momentum": "BatchNormalization's momentum",
}


def followed_text(scalings: Iterable[LearningRateScaling | None]) -> str:
    """Say what followed the batch size besides the learning rate, nothing where nothing did."""
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
