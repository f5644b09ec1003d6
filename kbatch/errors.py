"""All errors that kbatch raises.

ValueError
├── InputError            data, an argument or a directory that kbatch cannot use
│   └── InputTypeError    an argument of the wrong type (also a TypeError)
├── RecordError           a file that cannot be read as a record
├── PolicyUnsupported     a model that cannot run under a dtype policy
└── TargetTooLow          a latency target that no batch size reaches
TypeError
└── UnsendableError       an object that cannot be sent to another process
MemoryError
└── OutOfMemoryError      a model, or a batch of it, that does not fit in memory
RuntimeError
├── DeviceLostError       a device that runs nothing more in this process
└── WorkerDied            a worker process that ended while it worked
Exception
└── DataEnded             a data function with too few examples (kbatch catches it)
"""

# SIGABRT, SIGKILL and SIGSEGV, as Popen reports them and as a shell between the two does.
_MEMORY_EXITS = (-6, -9, -11, 134, 137, 139)


class InputError(ValueError):
    """Data, an argument or a directory cannot be used; the message says what to give instead."""


class InputTypeError(InputError, TypeError):
    """An argument has the wrong type; the message says what to give instead."""


class RecordError(ValueError):
    """A record cannot be read or written; the message names the file."""


class PolicyUnsupported(ValueError):
    """A model cannot be built or run under a dtype policy; the message says why."""


class TargetTooLow(ValueError):
    """The smallest batch takes longer than the latency target.

    Attributes:
        reachable_ms: Latency of the smallest batch, in milliseconds.
    """

    def __init__(self, latency_ms: float, quantile: float, batch_size: int, reachable_ms: float):
        smaller = "" if batch_size == 1 else "measure smaller batch sizes, "
        super().__init__(
            f"`latency_ms` must be at least what batch size {batch_size} takes, "
            f"{reachable_ms:.3g} ms at the {quantile:g} quantile: {smaller}give a higher target, "
            f"or a faster call path or model. Received: latency_ms={latency_ms:g}."
        )
        self.reachable_ms = reachable_ms


class UnsendableError(TypeError):
    """An object cannot be pickled, so it cannot be sent to another process."""


class OutOfMemoryError(MemoryError):
    """A model, or a batch that goes through it at once, does not fit in memory.

    Attributes:
        examples: Size of the batch that does not fit. If None, the model itself could not be built.
        fitting_examples: Largest batch that is known to fit, 0 if one example does not fit. If
            None, it is unknown.
        needed_bytes: Bytes that this batch needs, weights included. If None, it is unknown.
        limit_bytes: Bytes that could be used. If None, it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        examples: int | None = None,
        fitting_examples: int | None = None,
        needed_bytes: int | None = None,
        limit_bytes: int | None = None,
    ):
        super().__init__(message)
        self.examples = examples
        self.fitting_examples = fitting_examples
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class DeviceLostError(RuntimeError):
    """The device runs nothing more in this process, as after an illegal memory access."""

    def __init__(self):
        super().__init__(
            "The device failed in a way that lasts as long as this process: no later step could be "
            "trusted. Start the script again, or restart the notebook's kernel; a search resumes "
            'after its last finished trial. With `executor="local", max_parallel=1` each training '
            "run has its own process."
        )

    def __reduce__(self):
        """Pickle without arguments."""
        return type(self), ()


class WorkerDied(RuntimeError):
    """The worker process ended while it worked."""

    def __init__(self, exit_code: int, tail: str):
        super().__init__(
            f"The worker process ended with status {exit_code} while it worked. "
            f"The end of what it wrote:\n{tail}"
        )
        self.exit_code = exit_code  # Negative if a signal ended it: the number of the signal.
        self.tail = tail  # The end of what it wrote.
        self.out_of_memory = exit_code in _MEMORY_EXITS  # So it may be: a crash leaves them too.


class DataEnded(Exception):
    """A data function has fewer examples than a batch needs: only `rows`."""

    def __init__(self, rows: int):
        super().__init__(rows)
        self.rows = rows
