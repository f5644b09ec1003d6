"""Errors in what a person gave, told apart from failures of a run."""


class InputError(ValueError):
    """Training data that kbatch cannot use as given; the message says what to give."""
