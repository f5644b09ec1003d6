"""All errors that kbatch raises.

ValueError
├── InputError            data, an argument or a folder that kbatch cannot use
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

# Exit codes of SIGABRT, SIGKILL and SIGSEGV: from Popen, and from a shell that ran the process.
_MEMORY_EXITS = (-6, -9, -11, 134, 137, 139)


class InputError(ValueError):
    """Data, an argument or a folder cannot be used. The message says what to give instead."""


class InputTypeError(InputError, TypeError):
    """An argument has the wrong type. The message says what to give instead."""


class RecordError(ValueError):
    """A record cannot be read or written. The message names the file."""


class PolicyUnsupported(ValueError):
    """A model cannot be built or run under a dtype policy. The message says why."""


class TargetTooLow(ValueError):
    """The smallest batch takes longer than the latency target.

    Attributes:
        reachable_ms: Latency of the smallest batch, in milliseconds.
    """

    def __init__(self, latency_ms: float, quantile: float, batch_size: int, reachable_ms: float):
        smaller = "" if batch_size == 1 else "measure smaller batch sizes, "
        super().__init__(
            f"The latency target must be at least {reachable_ms:.3g} ms, because batch size "
            f"{batch_size} takes that long ({quantile:g} quantile): {smaller}give a higher target, "
            f"or make the model or its calls faster. Received: a target of {latency_ms:g} ms."
        )
        self.reachable_ms = reachable_ms


class UnsendableError(TypeError):
    """An object cannot be pickled, so it cannot be sent to another process."""


class OutOfMemoryError(MemoryError):
    """Raised if a model or one batch does not fit in memory.

    Example:

    >>> try:
    ...     kbatch.find_max_batch_size(build, x, y)
    ... except kbatch.OutOfMemoryError as error:
    ...     print(error.needed_bytes, error.limit_bytes)

    Attributes:
        examples: Size of the batch that does not fit. If None, the model itself could not be built.
        fitting_examples: Largest batch that fits, 0 if no example fits. If None, it is unknown.
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
    """The device cannot be used any more in this process, such as after an illegal access."""

    def __init__(self):
        super().__init__(
            "The device failed and cannot be used any more in this process. Start the script again "
            "or restart the notebook's kernel: a search resumes after its last finished trial. To "
            'run each training in its own process, give `executor="local", max_parallel=1`.'
        )

    def __reduce__(self):
        return type(self), ()


class WorkerDied(RuntimeError):
    """A worker process ended before it returned the result of a call."""

    def __init__(self, exit_code: int, tail: str):
        super().__init__(
            f"The worker process ended unexpectedly, with status {exit_code}. "
            f"The end of its output:\n{tail}"
        )
        self.exit_code = exit_code  # The negative number of the signal, if a signal ended it.
        self.tail = tail
        #: Whether memory may have run out. A process that crashed can have the same exit code.
        self.out_of_memory = exit_code in _MEMORY_EXITS


class DataEnded(Exception):
    """A data function has only `rows` examples, fewer than a batch needs."""

    def __init__(self, rows: int):
        super().__init__(rows)
        self.rows = rows
