"""The errors: mistakes in what a person gave, want of memory, the end of a worker process."""

# SIGABRT, SIGKILL and SIGSEGV, as Popen reports them and as a shell between the two does.
_MEMORY_EXITS = (-6, -9, -11, 134, 137, 139)


class InputError(ValueError):
    """Data, settings or a directory that kbatch cannot use as given; it says what to give."""


class InputTypeError(InputError, TypeError):
    """What was given is of a type that kbatch cannot use; it says what to give."""


class DeviceLostError(RuntimeError):
    """The device runs nothing more in this process, as after an illegal memory access."""

    def __init__(self):
        super().__init__(
            "The device failed in a way that lasts as long as this process: no later step could be "
            "trusted. Start the script again, or restart the notebook's kernel; a search goes on "
            'from its last finished trial. With `executor="local", max_parallel=1` each execution '
            "has a process of its own."
        )

    def __reduce__(self):
        """Pickle without arguments."""
        return type(self), ()


class OutOfMemoryError(MemoryError):
    """Not even one example fits in memory.

    Attributes:
        needed_bytes: What one example needs, weights included; None where it is not known.
        limit_bytes: What there is.
    """

    def __init__(self, message: str, needed_bytes: int | None, limit_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes

    def __reduce__(self):
        """Pickle all arguments, and the notes: it may come from a worker process."""
        return type(self), (str(self), self.needed_bytes, self.limit_bytes), self.__dict__


class UnsendableError(TypeError):
    """What cannot be pickled and so cannot go to another process."""


class WorkerDied(RuntimeError):
    """The worker process ended while it worked."""

    def __init__(self, exit_code: int, tail: str):
        super().__init__(
            f"The worker process ended with status {exit_code} while it worked. "
            f"The end of what it wrote:\n{tail}"
        )
        self.exit_code = exit_code  # A signal's number, negative, where one ended it.
        self.tail = tail  # The end of what it wrote.
        self.out_of_memory = exit_code in _MEMORY_EXITS  # So it may be: a crash leaves them too.
