"""The memory of training, micro-batch size by micro-batch size, where it may run out."""

import functools
import math
from collections.abc import Callable, Sequence

import keras

from kbatch.memory.memory_curve import MemoryPass, ascend_memory
from kbatch.memory.memory_probes import Probes, WorkerProbes
from kbatch.memory.memory_record import MemoryRecord
from kbatch.memory.memory_refusals import limit_below_weights
from kbatch.memory.probe_places import search_in_place
from kbatch.memory.workload import Load

# As in the search for the largest batch; what is above the window is not timed.
WINDOW = (0.80, 0.90)


def measure_training_memory(
    load: Load,
    model: Callable[[], keras.Model],
    micro_batch_sizes: Callable[[int | None], Sequence[int]],
    *,
    chosen: bool,
    memory_limit_bytes: int | None,
    time_budget_s: float,
    on_probe: Callable[[MemoryRecord], None] | None = None,
) -> MemoryPass:
    """Runs train steps of each size in a worker process, which may die of them.

    Args:
        load: What to run.
        model: Returns the model of this process, for probes in it; the model stays as it is.
        micro_batch_sizes: Returns the sizes, ascending, for the number of examples in the data.
        chosen: Whether a person chose them: then one that is expected not to fit is run too,
            unless it would be in this process.
        memory_limit_bytes: Memory that may be taken; None for what the device has, on a CPU half
            of what the host leaves.
        time_budget_s: Seconds after which no size is begun.
        on_probe: Receives each record.

    Raises:
        OutOfMemoryError: If not even the weights fit.
    """
    measure = functools.partial(
        _measured,
        sizes=micro_batch_sizes,
        chosen=chosen,
        time_budget_s=time_budget_s,
        on_probe=on_probe,
    )
    return search_in_place(
        load, measure, memory_limit_bytes=memory_limit_bytes, memory_window=WINDOW, model=model
    )


def _measured(
    probes: Probes,
    *,
    sizes: Callable[[int | None], Sequence[int]],
    chosen: bool,
    time_budget_s: float,
    on_probe: Callable[[MemoryRecord], None] | None,
) -> MemoryPass:
    facts = probes.facts
    if facts.variables_bytes > facts.limit_bytes:
        raise limit_below_weights(facts.limit_bytes, facts.variables_bytes)
    may_die = chosen and isinstance(probes, WorkerProbes)
    records = ascend_memory(
        probes,
        sizes(facts.examples),
        dtype_policy=facts.dtype_policy,
        limit_bytes=facts.limit_bytes,
        held_bytes=facts.held_bytes,
        time_budget_s=time_budget_s,
        guard_share=math.inf if may_die else WINDOW[1],
        on_probe=on_probe,
    )
    return MemoryPass(records, facts.limit_bytes, facts.notes)
