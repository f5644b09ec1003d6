"""The device of each worker of a search: a GPU of its own where there are enough."""

import os
from collections.abc import Mapping, Sequence

from kbatch.device.gpus import NvmlUnavailableError, opened_nvml, read_gpu_count

_VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKERS_ON_DEVICE = "KBATCH_WORKERS_ON_DEVICE"
WORKERS_ON_HOST = "KBATCH_WORKERS_ON_HOST"

# What TensorFlow sees in a process that is to use no GPU.
NO_GPU = {_VISIBLE: "-1"}


def device_environments(workers: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Share GPUs out among workers, in turn."""
    devices = [gpus[i % len(gpus)] if gpus else "-1" for i in range(workers)]
    return [_environment(device, devices.count(device), workers) for device in devices]


def _environment(device: str, sharing: int, workers: int) -> dict[str, str]:
    found = {_VISIBLE: device, WORKERS_ON_DEVICE: str(sharing), WORKERS_ON_HOST: str(workers)}
    if sharing > 1 and device != "-1":
        # Else the first of them takes all memory of the GPU.
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


def only_gpu(number: int, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a child process sees one GPU of this process alone."""
    named = _named_gpus(variables)
    # Without names CUDA numbers the GPUs of the child as it does those of this process.
    return {_VISIBLE: str(number) if named is None else named[number]}


def usable_gpus(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """List the GPUs that this process may use, without starting TensorFlow."""
    check_named_gpus(variables)
    named = _named_gpus(variables)
    return _host_gpus()[0] if named is None else named


def check_named_gpus(variables: Mapping[str, str] | None = None) -> None:
    """Check that `CUDA_VISIBLE_DEVICES` names GPUs that exist: CUDA ignores others silently."""
    named = _named_gpus(variables)
    if not named:
        return
    uuids, count = _host_gpus()
    for name in named:
        # A GPU that does not answer has no UUID to compare with.
        unknown = name.startswith("GPU-") and len(uuids) == count
        missing = int(name) >= count if name.isdigit() else unknown
        if count and missing and not any(uuid.startswith(name) for uuid in uuids):
            there = "1 GPU, number 0" if count == 1 else f"{count} GPUs, numbers 0 to {count - 1}"
            raise ValueError(
                "`CUDA_VISIBLE_DEVICES` must name GPUs that `nvidia-smi -L` lists: TensorFlow sees "
                f"neither another one nor those named after it. This host has {there}. "
                f"Received: CUDA_VISIBLE_DEVICES={','.join(named)}, where {name} does not exist."
            )


def _named_gpus(variables: Mapping[str, str] | None) -> tuple[str, ...] | None:
    """Return the names in `CUDA_VISIBLE_DEVICES`, None where it is not set."""
    chosen = (os.environ if variables is None else variables).get(_VISIBLE)
    if chosen is None:
        return None
    names = [name.strip() for name in chosen.split(",")]
    # As in CUDA, what follows a name that is none does not count.
    valid = [bool(name) and not name.startswith("-") for name in names]
    return tuple(names[: valid.index(False) if False in valid else len(names)])


def _host_gpus() -> tuple[tuple[str, ...], int]:
    """Return the UUIDs of the GPUs that answer, and how many GPUs there are."""
    try:
        with opened_nvml() as gpus:
            return tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None), read_gpu_count()
    except NvmlUnavailableError:
        return (), 0  # No driver, no GPU.
