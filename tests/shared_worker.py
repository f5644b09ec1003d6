"""One worker process for all probes of memory, where the process is not what a test is about."""

import builtins
import contextlib
import functools

import pytest

from kbatch.device.memory import limited_cpu
from kbatch.device.worker import Worker


class SharedWorker:
    """Stands for a worker of its own, each of which takes eight seconds of a processor to start."""

    def __init__(self, process, environment, subject):
        self._process, self._subject, self._has_begun = process, subject, False

    def call(self, function, *arguments):
        if not self._has_begun:
            self._process.call(_begin, self._subject)
            self._has_begun = True
        return self._process.call(_go_on, function, arguments)

    def read_output(self):
        return ""

    def restart(self):
        self._has_begun = False

    def close(self):
        """Leave the process to the next one."""


def _begin(subject):
    builtins.kept_subject = subject()


def _go_on(function, arguments):
    return function(builtins.kept_subject, *arguments)


@contextlib.contextmanager
def shared_worker():
    """Let all probes run in one process, whose allocator has 4 GiB."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | limited_cpu(2**32)
    with Worker(environment) as process, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbatch.memory.probe.Worker", functools.partial(SharedWorker, process))
        yield
