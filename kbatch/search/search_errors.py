"""Which errors end a search, and which end a trial alone."""

import contextlib
from collections.abc import Iterator

import keras_tuner

from kbatch.errors import OutOfMemoryError


@contextlib.contextmanager
def ending_the_search(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the search at a mistake in what was given: no other trial would fare better."""
    try:
        yield
    except kinds as error:
        raise keras_tuner.errors.FatalValueError(str(error)) from error


@contextlib.contextmanager
def failing_the_trial() -> Iterator[None]:
    """Fails the trial, not the search, where not even one example fits."""
    try:
        yield
    except OutOfMemoryError as error:
        raise keras_tuner.errors.FailedTrialError(
            f"{error} keras-tuner ends a search after three failed trials in a row, unless its "
            "oracle is given a larger `max_consecutive_failed_trials`."
        ) from error
