"""What is said when a model cannot fit at all."""

from kbatch.device.device_memory import other_processes
from kbatch.device.worker import WorkerDied
from kbatch.document.number_text import memory_text
from kbatch.document.where_measured import neighbours_text
from kbatch.errors import InputError, OutOfMemoryError
from kbatch.memory.memory_probes import LoadFacts


def check_facts(facts: LoadFacts) -> LoadFacts:
    """Checks that the weights fit and that there is a second size to try.

    Raises:
        InputError: If not.
    """
    if facts.variables_bytes > facts.limit_bytes:
        raise limit_below_weights(facts.limit_bytes, facts.variables_bytes)
    if facts.examples == 1:
        raise InputError(
            "The data have one example, and a second size must be tried: give more rows, or "
            "`longest_example=(x, y)`. Received: 1 example."
        )
    return facts


def limit_below_weights(limit_bytes: int, variables_bytes: int) -> OutOfMemoryError:
    """Says that not even the weights fit."""
    return _refusal(
        "The memory limit is below the weights of the model, with what the optimizer keeps of "
        "them: give a larger `memory_limit_bytes` or a smaller model. "
        f"Received: a limit of {memory_text(limit_bytes)}, weights of "
        f"{memory_text(variables_bytes)}.",
        variables_bytes,
        limit_bytes,
    )


def weights_alone_do_not_fit(limit_bytes: int | None, weights_bytes: int) -> OutOfMemoryError:
    """Says that a model that is to predict does not fit.

    Args:
        limit_bytes: The limit, None for all of the device.
        weights_bytes: What its variables take.
    """
    limit = "all of the device" if limit_bytes is None else memory_text(limit_bytes)
    return _refusal(
        "Not even the weights of the model fit in memory: give a larger `memory_limit_bytes`, or a "
        f"smaller model. Received: a limit of {limit}, weights of {memory_text(weights_bytes)}.",
        weights_bytes,
        limit_bytes or 0,
    )


def weights_do_not_fit(limit_bytes: int | None, died: WorkerDied | None = None) -> OutOfMemoryError:
    """Says that the model could not even be built with all the memory that there is.

    Args:
        limit_bytes: The limit, None for all of the device.
        died: How the worker process ended of it, if it did.
    """
    limit = "all of the device" if limit_bytes is None else memory_text(limit_bytes)
    return _with_end_of_worker(
        died,
        "The model could not be built: its weights, with what the optimizer keeps of them, need "
        "more memory than there is. Use a smaller model or more memory. "
        f"Received: a limit of {limit}.",
        None,
        limit_bytes or 0,
    )


def no_example_fits(
    facts: LoadFacts,
    memory_window: tuple[float, float],
    needed_bytes: float | None,
    died: WorkerDied | None = None,
) -> OutOfMemoryError:
    """Says what one example needs.

    Args:
        facts: What is known of the load.
        memory_window: Lower and upper share of the limit.
        needed_bytes: What one example needs; None where only the failure is known.
        died: How the worker process ended of it, if it did.
    """
    limit = memory_text(facts.limit_bytes)
    needs = "more than that" if needed_bytes is None else memory_text(needed_bytes)
    return _with_end_of_worker(
        died,
        f"One example does not fit: with the weights it needs {needs}, and the memory window ends "
        f"at {memory_window[1]:.0%} of {limit}. The weights, with what the optimizer keeps of "
        f"them, are {memory_text(facts.variables_bytes)}. Use a smaller model, shorter examples, "
        "`mixed_float16`, or more memory.",
        None if needed_bytes is None else int(needed_bytes),
        facts.limit_bytes,
    )


def _with_end_of_worker(
    died: WorkerDied | None, message: str, needed_bytes: int | None, limit_bytes: int
) -> OutOfMemoryError:
    """Adds how the worker process ended: a crash leaves what want of memory leaves."""
    if died is None:
        return _refusal(message, needed_bytes, limit_bytes)
    error = _refusal(
        f"{message} It was found so because the worker process ended with status "
        f"{died.exit_code}, which a crash of another kind leaves as well.",
        needed_bytes,
        limit_bytes,
    )
    error.__cause__ = died
    error.add_note(f"The end of what the worker process wrote:\n{died.tail}")
    return error


def _refusal(message: str, needed_bytes: int | None, limit_bytes: int) -> OutOfMemoryError:
    """Add who else holds memory of the GPUs: it is the cause where a model fits on an empty one."""
    beside = neighbours_text(other_processes(on_any_gpu=True))
    return OutOfMemoryError(f"{message} {beside}".strip(), needed_bytes, limit_bytes)
