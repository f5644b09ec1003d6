"""How other tools search the largest batch, each written from its description.

Every function takes a probe and returns a size, or None if nothing ran. Starting sizes and
thresholds are the tools' defaults; no upper bound is set, so that none holds them back.
"""

from memory_devices import OutOfMemory, Probe

MOST_PROBES = 60


def lightning_power(probe: Probe) -> int | None:
    """Lightning's `BatchSizeFinder(mode="power")`: doubles from 2 until memory runs out.

    Source: lightning.ai/docs, `BatchSizeFinder`.
    """
    return _doubled(probe, 2)[0]


def lightning_binsearch(probe: Probe) -> int | None:
    """Lightning's `mode="binsearch"`: doubles, halves the gap to nothing, takes off 5 %.

    Source: lightning.ai/docs, `BatchSizeFinder`, arguments `mode` and `margin`.
    """
    fitted, failed = _doubled(probe, 2)
    if fitted is None or failed is None:
        return fitted
    while failed - fitted > 1:
        middle = (fitted + failed) // 2
        fitted, failed = (middle, failed) if probe.fits(middle) else (fitted, middle)
    return max(1, int(fitted * 0.95))


def accelerate_halving(probe: Probe) -> int | None:
    """accelerate's `find_executable_batch_size` as first published: halves from 128.

    Source: huggingface.co/docs/accelerate v0.16, "Memory utilities".
    """
    return _shrunk(probe, 128, 0.5)


def accelerate_tenth(probe: Probe) -> int | None:
    """accelerate's `find_executable_batch_size` today: takes off a tenth from 128.

    Source: huggingface/accelerate, `accelerate.utils.memory`.
    """
    return _shrunk(probe, 128, 0.9)


def nemo_oomptimizer(probe: Probe) -> int | None:
    """NeMo's OOMptimizer: doubles or halves from 32, then bisects to a gap of 5 %.

    It lets the process use 90 % of the memory, so that its failures lie there.

    Source: NVIDIA/NeMo, `oomptimizer.py`, options `threshold` and `memory-fraction`.
    """
    size, fitted, failed = 32, None, None
    while size >= 1 and probe.probes < MOST_PROBES:
        if probe.fits(size, share=0.9):
            fitted = size
        else:
            failed = size
        if fitted is None:
            size //= 2
        elif failed is None:
            size *= 2
        elif failed - fitted <= max(1, 0.05 * failed):
            break
        else:
            size = round((fitted + failed) / 2)
    return fitted


def otx_full(probe: Probe) -> int | None:
    """Intel OTX's adaptive batch size, "Full": even sizes, lines through what was measured.

    The default size is 8. Where it is too large it is lowered by bisection, else a second size
    two larger gives a line, and each estimate aims at 82 % until one is in 80 to 85 %.

    Source: openvinotoolkit/training_extensions, "Auto-configuration" and `BsSearchAlgo`.
    """
    limit = probe.device.limit_bytes
    first = _measured(probe, 8)
    if first is None or first > 0.85 * limit:
        return _otx_lowered(probe)
    memory = {8: first}
    second = _measured(probe, 10)
    if second is None or second > 0.85 * limit:
        return 8
    memory[10] = second
    aim, size = 0.82, 10
    while probe.probes < MOST_PROBES:
        size = _otx_estimate(memory, aim * limit, limit)
        if size in memory:
            break
        found = _measured(probe, size)
        if found is None:
            aim -= 0.1
            if aim <= 0:
                return 10
            continue
        memory[size], aim = found, 0.82
        if 0.80 * limit <= found <= 0.85 * limit:
            break
    return size


def _otx_lowered(probe: Probe) -> int | None:
    fitted, failed, size = 0, 8, 4
    while failed - fitted > 2:
        found = _measured(probe, size)
        if found is None or found > 0.85 * probe.device.limit_bytes:
            failed = size
        else:
            fitted = size
        size = (fitted + failed) // 2
        size += size % 2
    return fitted or None


def _otx_estimate(memory: dict[int, float], aim: float, limit: float) -> int:
    def distance(size: int) -> float:
        return max(0.80 * limit - memory[size], memory[size] - 0.85 * limit, 0.0)

    nearest, *others = sorted(memory, key=distance)
    rises = [(memory[o] - memory[nearest]) / (o - nearest) for o in others]
    slope = next((rise for rise in rises if rise != 0), 0.0)
    if slope == 0:
        return nearest + 2
    return max(2, 2 * round((nearest + (aim - memory[nearest]) / slope) / 2))


def _doubled(probe: Probe, size: int) -> tuple[int | None, int | None]:
    """Doubles a size until memory runs out; halves it if the first size does already."""
    while size >= 1 and not probe.fits(size):
        size //= 2
    if size < 1:
        return None, None
    fitted = size
    for _ in range(25):
        if not probe.fits(2 * fitted):
            return fitted, 2 * fitted
        fitted *= 2
    return fitted, None


def _shrunk(probe: Probe, size: int, factor: float) -> int | None:
    while size >= 1:
        if probe.fits(size):
            return size
        size = int(size * factor)
    return None


def _measured(probe: Probe, size: int) -> float | None:
    try:
        return probe.run(size)
    except OutOfMemory:
        return None


PUBLISHED = {
    "Lightning, power": lightning_power,
    "Lightning, binsearch": lightning_binsearch,
    "accelerate, halving": accelerate_halving,
    "accelerate, a tenth less": accelerate_tenth,
    "NeMo OOMptimizer": nemo_oomptimizer,
    "Intel OTX, Full": otx_full,
}
