"""Records for tests with plausible values. A test gives only the values that it is about."""

import dataclasses

from kbatch.records.json_codec import write_record
from kbatch.records.machine import EnvironmentRecord, GpuSample, GpuUsage, UsageRecord
from kbatch.records.training_run import EpochRecord, ExecutionRecord, SearchRecord
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord

VAL_ACCURACY = Objective("val_accuracy", "max")
FAILURES = {
    "out_of_memory": "ResourceExhaustedError: out of memory while allocating 2.1 GiB",
    "failed": "ValueError: the loss is not finite",
}


def make_epochs(accuracies, *, examples=1437, updates=23, train_s=0.5, data_wait_s=0.01):
    return tuple(
        EpochRecord(
            epoch=epoch,
            metrics={"loss": 1 - value, "val_accuracy": value, "val_loss": 1.1 - value},
            examples=examples,
            updates=updates,
            train_s=train_s,
            data_wait_s=data_wait_s,
        )
        for epoch, value in enumerate(accuracies)
    )


def with_moments(epochs, pairs):
    """The epochs with a pair of gradient variance and squared norm for each."""
    names = "gradient_variance", "gradient_squared_norm"
    return tuple(
        dataclasses.replace(epoch, metrics=epoch.metrics | dict(zip(names, pair, strict=True)))
        for epoch, pair in zip(epochs, pairs, strict=True)
    )


def make_execution(
    batch_size=64, *, accuracies=(0.9, 0.97), rate=1000.0, status="completed", **changed
):
    completed = status == "completed"
    fields = {
        "status": status,
        "seed": 0,
        "batch_size": batch_size,
        "micro_batch_size": min(batch_size, 128),
        "dtype_policy": "mixed_float16",
        "optimizer": "Adam",
        "loss_scaled": True,
        "learning_rate": 0.001,
        "jit_compile": False,
        "plan": 1,
        "failure": FAILURES.get(status),
    }
    if completed:
        fields |= {
            "batch_size_seen": batch_size,
            "window_examples": (100, 100, 100, 100, 100),
            "window_durations_s": tuple(100 / rate * k for k in (0.98, 0.99, 1.0, 1.01, 1.02)),
            "first_step_s": 1.25,
            "examples_seen": 1437 * len(accuracies),
            "updates": -(-1437 // batch_size) * len(accuracies),
            "train_s": 2.5,
            "data_wait_s": 0.05,
            "total_s": 4.0,
            "epochs": make_epochs(accuracies, updates=-(-1437 // batch_size)),
        }
    fields |= changed
    return ExecutionRecord(**({"epochs_asked": len(fields.get("epochs", ()))} | fields))


def make_trial(
    batch_size=64,
    *executions,
    trial_id=None,
    objective=VAL_ACCURACY,
    hyperparameters=None,
    **changed,
):
    executions = executions or (make_execution(batch_size, **changed),)
    return TrialRecord(
        trial_id=f"{batch_size:04d}" if trial_id is None else trial_id,
        hyperparameters={
            "batch_size": batch_size,
            "dtype_policy": executions[0].dtype_policy,
            **(hyperparameters or {}),
        },
        objective=objective,
        executions=tuple(executions),
    )


def make_environment(**changed):
    fields = {
        "versions": {"python": "3.13.1", "tensorflow": "2.21.0", "keras": "3.15.1"},
        "platform": "Linux-6.8-x86_64",
        "cpu": "Example CPU at 3 GHz",
        "cpu_count": 16,
        "memory_bytes": 64 * 2**30,
        "devices": ("CPU",),
        "load_average": 0.4,
        "command": "python examples/digits.py --seed 0",
        "created_at": "2025-01-02T03:04:05+00:00",
    }
    return EnvironmentRecord(**(fields | changed))


def make_search(**changed):
    settings = {
        "batch_sizes": [16, 32, 64, 128],
        "micro_batch_size": 128,
        "dtype_policy": "mixed_float16",
        "learning_rate_scaling": "sqrt",
        "base_batch_size": 16,
        "seed": 0,
    }
    return SearchRecord(settings | changed, make_environment())


def make_study(*trials, name="digits", search=None, problems=()):
    """A study of these trials, or of seven sizes, of which the largest ran out of memory."""
    if not trials:
        values = {16: 0.964, 32: 0.978, 64: 0.981, 128: 0.972, 256: 0.95, 512: 0.911}
        learned = (
            make_trial(size, accuracies=(value - 0.05, value), rate=900 * size**0.45)
            for size, value in values.items()
        )
        trials = (*learned, make_trial(4096, status="out_of_memory"))
    ordered = sorted(trials, key=lambda trial: (trial.batch_size, trial.trial_id))
    return Study(name, tuple(ordered), search or make_search(), tuple(problems))


def write_search(folder, *trials, search=None):
    """Write the records of a search into a folder, and return the folder."""
    write_record(search or make_search(), folder / "kbatch.json")
    for trial in trials:
        write_record(trial, folder / f"trial_{trial.trial_id}" / "kbatch.json")
    return folder


def make_diverged(batch_size, text="diverged: the loss is nan"):
    """A trial whose training loss did not stay finite."""
    epoch = EpochRecord(
        epoch=0, metrics={"loss": None}, examples=1437, updates=1, train_s=1.0, data_wait_s=0.0
    )
    return make_trial(batch_size, status="failed", failure=text, epochs=(epoch,))


def make_gpu(*, energy_j=1000.0, power_w=300.0, utilization=0.8):
    """The usage of a GPU with constant readings."""
    shown = (utilization, 2e9, power_w)
    samples = tuple(GpuSample(float(t), *shown) for t in range(4))
    return GpuUsage(
        name="Example GPU",
        pci_bus_id="00000000:01:00.0",
        tensorflow_devices=("GPU:0",),
        memory_total_bytes=80 * 2**30,
        energy_j=energy_j,
        energy_source=None if energy_j is None else "counter",
        mean=GpuSample(1.5, *shown),
        samples=samples,
    )


def make_usage(*gpus):
    """The usage of these GPUs in a run of 4 s. Without GPUs, nothing was read."""
    return UsageRecord(
        duration_s=4.0,
        readings=4,
        gpus=gpus or None,
        unavailable=None if gpus else "There is no NVIDIA driver: its library NVML was not found.",
    )
