"""How a worker process fails, as a program without workers must know it too."""

# SIGABRT, SIGKILL and SIGSEGV, as Popen tells them and as a shell between the two does.
_MEMORY_EXITS = (-6, -9, -11, 134, 137, 139)


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
