"""Realistic studies and results with the data of all figures."""

import dataclasses
import math
import random

from records_factory import (
    VAL_ACCURACY,
    make_environment,
    make_execution,
    make_gpu,
    make_study,
    make_trial,
)
from records_factory import make_usage as usage_of

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.memory.result import MaxBatchSizeResult, ProbeRecord
from kbatch.records.notes import Note
from kbatch.records.training_run import EpochRecord, Outcomes, Plan, Target

SIZES = (16, 32, 64, 128, 256, 512, 1024)
EXAMPLES = 1437
TARGET = Target("val_accuracy", 0.9, "max")


def step_time_s(batch_size):
    """The time of a step with an overhead of 6 ms, at 18,000 samples/s."""
    return 0.006 + batch_size / 18_000


def learning(batch_size, *, best=0.985, epochs=20, rng=None, moments=True):
    """Epochs of a model whose accuracy grows with updates, with a growing noise scale."""
    rng = rng or random.Random(batch_size)
    updates = -(-EXAMPLES // batch_size)
    found = []
    for epoch in range(epochs):
        learnt = 1 - math.exp(-(epoch + 1) * updates / (60 + 6 * batch_size**0.35))
        accuracy = min(0.999, max(0.05, best * (0.1 + 0.9 * learnt) + rng.gauss(0, 0.004)))
        metrics = {"loss": 1.1 - accuracy, "val_accuracy": accuracy, "val_loss": 1.15 - accuracy}
        if moments:
            norm = rng.lognormvariate(0, 0.1) / (1 + epoch)
            metrics["gradient_squared_norm"] = norm
            metrics["gradient_variance"] = norm * (60 + 25 * epoch) * rng.lognormvariate(0, 0.1)
        train_s = updates * step_time_s(batch_size)
        found.append(EpochRecord(epoch, metrics, EXAMPLES, updates, train_s, 0.01))
    return tuple(found)


def learned(batch_size, **changed):
    """A training run with epochs of `learning`."""
    arguments = {name: changed.pop(name) for name in ("best", "rng", "moments") if name in changed}
    rng = arguments.get("rng") or random.Random(batch_size)
    return make_execution(
        batch_size,
        rate=batch_size / step_time_s(batch_size) * rng.lognormvariate(0, 0.02),
        epochs=learning(batch_size, **arguments),
        **changed,
    )


def learned_study(executions=1, *, sizes=SIZES, name="digits", **changed):
    """A trial of each size, and one that ran out of memory."""
    rng = random.Random(3)
    trials = [
        make_trial(size, *(learned(size, rng=rng, **changed) for _ in range(executions)))
        for size in sizes
    ]
    return make_study(*trials, make_trial(4096, status="out_of_memory"), name=name)


def rates_study(objective=VAL_ACCURACY):
    """Rates of two batch sizes: short runs, complete runs, and one that diverged."""

    def trial(size, octaves, *accuracies, **changed):
        rate = 2.0**octaves * 1e-3
        scaling = LearningRateScaling("sqrt", size, 32, 2.0**octaves, rate)
        changed |= {"learning_rate": rate, "scaling": scaling}
        runs = [make_execution(size, accuracies=(value,), **changed) for value in accuracies]
        found = {"learning_rate_factor": 2.0**octaves}
        name = f"{size}-{octaves}"
        return make_trial(size, *runs, trial_id=name, hyperparameters=found, objective=objective)

    lost = EpochRecord(0, {"loss": None}, EXAMPLES, 1, 1.0, 0.0)
    return make_study(
        trial(32, -2, 0.5, length="short"),
        trial(32, 0, 0.7, length="short"),
        trial(32, 2, 0.95, 0.96, 0.97),
        trial(32, 3, 0.9, outcomes=Outcomes("val_accuracy", values=(0.8, 0.9, 1.0), key="k")),
        trial(128, 3, 0.94),
        trial(128, 4, 0.6, length="stopped_early"),
        trial(128, 6, 0.1, status="failed", epochs=(lost,)),
        make_trial(4096, status="out_of_memory"),
    )


def timed(study, *, workers=1):
    """The study with a plan and with start times of its runs on this number of workers."""
    trials, at_s = [], [1e9] * workers
    for trial in study.trials:
        runs = []
        for run in trial.executions:
            began_at, train_s = min(at_s), run.train_s or 1.0
            at_s[at_s.index(began_at)] += 1.5 * train_s + 0.5
            spans = ((began_at, train_s, 1.5 * train_s),)
            runs.append(dataclasses.replace(run, spans=spans))
        trials.append(dataclasses.replace(trial, executions=tuple(runs)))
    plan = Plan(1, "float32", None, "fits", 1024, "", began_at=1e9 - 5, duration_s=4.0)
    return dataclasses.replace(study, trials=tuple(trials), plan=plan)


def tuned_study(count, *, name="digits"):
    """A study of `count` trials with several hyperparameters, some of which failed."""
    rng = random.Random(5)
    trials = []
    for number in range(count):
        size = rng.choice((8, *SIZES))
        tuned = {
            "units": rng.choice((8, 16, 32, 64)),
            "learning_rate": rng.choice((1e-2, 1e-3, 1e-4)),
            "a_hyperparameter_with_a_very_long_name": rng.choice(("relu", "gelu")),
        }
        arguments = {"trial_id": f"{number:03d}", "hyperparameters": tuned}
        if rng.random() < 0.08:
            trials.append(
                make_trial(size, status=rng.choice(("failed", "out_of_memory")), **arguments)
            )
        else:
            execution = learned(size, rng=rng, best=rng.uniform(0.7, 0.98))
            trials.append(make_trial(size, execution, **arguments))
    return make_study(*trials, name=name)


def to_target(batch_size, updates, *, met=True, epochs=None):
    """A run that meets the target after this number of updates, or never."""
    per_epoch = -(-EXAMPLES // batch_size)
    count = epochs or -(-updates // per_epoch)
    values = [0.5] * (count - 1) + [0.95 if met else 0.6]
    train_s = per_epoch * step_time_s(batch_size)
    return make_execution(
        batch_size,
        rate=batch_size / step_time_s(batch_size),
        target=TARGET,
        epochs=tuple(
            EpochRecord(e, {"loss": 0.5, "val_accuracy": v}, EXAMPLES, per_epoch, train_s, 0.01)
            for e, v in enumerate(values)
        ),
    )


def target_study(executions=1, *, sizes=(4, 8, *SIZES), missed=(2048,), **changed):
    """A study with S_min = 30 and B_crit = 150. Missed sizes never meet the target."""
    rng = random.Random(3)
    trials = [
        make_trial(
            size,
            *(
                to_target(size, round(30 * (1 + 150 / size) * rng.lognormvariate(0, 0.04)))
                for _ in range(executions)
            ),
        )
        for size in sizes
    ]
    trials += [make_trial(size, to_target(size, 0, met=False, epochs=30)) for size in missed]
    return make_study(*trials, make_trial(4096, status="out_of_memory"), **changed)


def gpu_study():
    """A study whose trials have readings of a GPU."""
    trials = (make_trial(size, learned(size, usage=usage_of(make_gpu()))) for size in (32, 64))
    return make_study(*trials)


def max_batch_result(**changed):
    """A search with an out-of-memory probe, a probe above the window and a confirmed answer."""
    limit = 8 * 2**30
    sizes = ((1, "fits"), (40, "fits"), (800, "fits"), (2600, "above_window"), (2250, "fits"))
    probes = [ProbeRecord(s, _memory(s), outcome, 2.0) for s, outcome in sizes]
    probes.insert(3, ProbeRecord(4000, None, "out_of_memory", 3.0))
    probes.append(ProbeRecord(2250, _memory(2250) + 10**7, "fits", 9.0, "fresh_process"))
    fields = {
        "max_batch_size": 2250,
        "reason": Note.of("in_window"),
        "limit_bytes": limit,
        "memory_window": (0.8, 0.9),
        "training": True,
        "device": "GPU:0",
        "dtype_policy": "mixed_float16",
        "weights_bytes": 10**8,
        "probes": tuple(probes),
        "environment": make_environment(),
    }
    return MaxBatchSizeResult(**(fields | changed))


def _memory(batch_size):
    return int(0.6 * 2**30 + 2.95e6 * batch_size)
