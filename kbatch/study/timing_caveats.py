"""What a reader of a study's samples/s must know."""

from collections.abc import Iterator

from kbatch.document.number_text import listed, percent, readable
from kbatch.study.caveat import Caveat, concerned
from kbatch.study.conditions import conditions_of
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
_UNSTABLE_SPREAD = 0.2
_UNEVEN = 0.1
_BUSY_LOAD_SHARE = 0.5
_SPEED = ("samples_per_second",)


def timing_caveats(study: Study) -> Iterator[Caveat]:
    """Lists what limits the samples/s of a study with at least one trial."""
    rules = (
        _data_wait,
        _one_window,
        _unstable,
        _uneven,
        _busy_host,
        _shared_device,
        _clocks,
        _float16_on_cpu,
    )
    for rule in rules:
        yield from rule(study)


def _data_wait(study: Study) -> Iterator[Caveat]:
    def waits(trial: TrialRecord) -> bool:
        return (trial.mean(lambda e: e.data_wait_share) or 0) > MUCH_DATA_WAIT

    if found := concerned(study.trials, waits):
        yield Caveat(
            "waiting for data",
            f"Training waited for data more than {percent(MUCH_DATA_WAIT)} of its time at "
            f"{found.sizes}: there the samples/s, and a comparison of batch sizes by them, measure "
            "the input pipeline, not the model. `kbatch.profile_input_pipeline` tries what would "
            "help.",
            _SPEED,
            found.trial_ids,
        )


def _one_window(study: Study) -> Iterator[Caveat]:
    def short(trial: TrialRecord) -> bool:
        return trial.status == "completed" and any(
            len(execution.window_examples) == 1 for execution in trial.executions
        )

    if found := concerned(study.trials, short):
        yield Caveat(
            "one timing window",
            f"Training was timed over one window only at {found.sizes}: samples/s may be off by "
            "much. Train longer for a spread.",
            _SPEED,
            found.trial_ids,
        )


def _unstable(study: Study) -> Iterator[Caveat]:
    def unstable(trial: TrialRecord) -> bool:
        spreads = [
            (t.high - t.low) / t.median for e in trial.executions if (t := e.throughput) is not None
        ]
        return max(spreads, default=0) > _UNSTABLE_SPREAD

    if found := concerned(study.trials, unstable):
        yield Caveat(
            "unstable timing",
            f"Timing was not stable at {found.sizes}: the quartiles of samples/s lie more than "
            f"{percent(_UNSTABLE_SPREAD)} of the median apart. Repeat on an idle machine.",
            _SPEED,
            found.trial_ids,
        )


def _uneven(study: Study) -> Iterator[Caveat]:
    def difference(trial: TrialRecord) -> float:
        got, median = trial.samples_per_second, trial.window_samples_per_second
        return abs(got / median - 1) if got and median else 0.0

    if found := concerned(study.trials, lambda trial: difference(trial) > _UNEVEN):
        most = max(study.trials, key=difference)
        got, median = most.samples_per_second or 0.0, most.window_samples_per_second or 0.0
        where = f" at {most.batch_size:,}, the most" if len(found.trial_ids) > 1 else ""
        yield Caveat(
            "uneven steps",
            f"Some steps took far longer than most at {found.sizes}. The samples/s count all steps "
            f"and differ by more than {percent(_UNEVEN)} from the median of the timing windows: "
            f"{readable(got)} against {readable(median)}{where}.",
            _SPEED,
            found.trial_ids,
        )


def _busy_host(study: Study) -> Iterator[Caveat]:
    environment = study.search.environment if study.search else None
    if environment is None or environment.load_average is None:
        return
    if environment.load_average > _BUSY_LOAD_SHARE * environment.cpu_count:
        yield Caveat(
            "busy machine",
            f"The machine was busy at the start (load average {environment.load_average:.1f} on "
            f"{environment.cpu_count} processors): samples/s may be too low.",
            _SPEED,
        )


def _shared_device(study: Study) -> Iterator[Caveat]:
    def workers(trial: TrialRecord) -> int:
        return max(execution.workers_on_device or 1 for execution in trial.executions)

    if found := concerned(study.trials, lambda trial: workers(trial) > 1):
        most = max(workers(trial) for trial in study.trials)
        yield Caveat(
            "shared device",
            f"The device was shared by {most} workers at {found.sizes}: there the samples/s are "
            "those of a part of it, and depend on what the others ran. Repeat with one worker a "
            "device to compare them.",
            _SPEED,
            found.trial_ids,
        )


def _clocks(study: Study) -> Iterator[Caveat]:
    apart = conditions_of(study).clocks
    usages = [e.usage for trial in study.trials for e in trial.executions if e.usage is not None]
    gpus = [gpu for usage in usages for gpu in usage.gpus or ()]
    reasons = dict.fromkeys(reason for gpu in gpus for reason in gpu.throttle_reasons or ())
    if apart:
        lowered = f" What lowered it: {listed(reasons)}." if reasons else ""
        yield Caveat(
            "GPU clocks differ",
            f"Trials ran at different clocks ({apart}), and their samples/s differ by that too."
            f"{lowered} `nvidia-smi --lock-gpu-clocks` holds one clock for a comparison.",
            _SPEED,
        )


def _float16_on_cpu(study: Study) -> Iterator[Caveat]:
    policies = {trial.dtype_policy for trial in study.trials}
    environment = study.search.environment if study.search else None
    if policies != {"mixed_float16"} or environment is None or environment.devices != ("CPU",):
        return
    yield Caveat(
        "float16 on a processor",
        "Every trial ran under mixed_float16 on a processor, where it is often the slower policy: "
        '`kbatch doctor` measures that, and `dtype_policy=("float32", "mixed_float16")` compares '
        "both in the search.",
        _SPEED,
    )
