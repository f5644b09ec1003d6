"""The device of each worker of a search: a GPU of its own where there are enough."""

import os
from collections.abc import Mapping, Sequence

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORKERS = "KBATCH_WORKERS_ON_DEVICE"

# What TensorFlow sees in a process that is to use no GPU.
NO_GPU = {_VISIBLE: "-1"}


def device_environments(workers: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Shares GPUs out among workers, in turn.

    Args:
        workers: How many workers there are.
        gpus: Names of the GPUs, as `CUDA_VISIBLE_DEVICES` takes them; none for a CPU, which all
            workers share.

    Returns:
        Variables of each worker, with how many workers its device has.
    """
    devices = [gpus[i % len(gpus)] if gpus else "-1" for i in range(workers)]
    return [_environment(device, devices.count(device)) for device in devices]


def _environment(device: str, sharing: int) -> dict[str, str]:
    found = {_VISIBLE: device, _WORKERS: str(sharing)}
    if sharing > 1 and device != "-1":
        # Else the first of them takes all memory of the GPU.
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


def workers_on_device(variables: Mapping[str, str] | None = None) -> int | None:
    """Tells how many workers share the device of this process; None outside `kbatch distribute`.

    Args:
        variables: Environment variables, those of this process if None.
    """
    text = (os.environ if variables is None else variables).get(_WORKERS, "")
    return int(text) if text.isdigit() else None


def usable_gpus(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Lists the GPUs that this process may use, without starting TensorFlow.

    Args:
        variables: Environment variables, those of this process if None.

    Returns:
        Their names for `CUDA_VISIBLE_DEVICES`: what stands there, or the UUIDs of all.
    """
    chosen = (os.environ if variables is None else variables).get(_VISIBLE)
    if chosen is None:
        return _uuids()
    names = [name.strip() for name in chosen.split(",")]
    # As in CUDA, what follows a name that is none does not count.
    valid = [bool(name) and not name.startswith("-") for name in names]
    return tuple(names[: valid.index(False) if False in valid else len(names)])


def _uuids() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # No driver, no GPU.
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
