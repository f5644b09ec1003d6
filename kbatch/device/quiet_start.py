"""TensorFlow started without its start-up messages."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back what native code writes to stderr while TensorFlow is imported.

    TensorFlow writes some lines before its own log level, `TF_CPP_MIN_LOG_LEVEL`, applies. That is
    set too, unless it is set already. After an error all lines are shown.

    Example:

    >>> with kbatch.quiet_start():
    ...     import tensorflow as tf
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
