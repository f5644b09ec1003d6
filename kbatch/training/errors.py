"""Mistakes in what a person gave, told apart from failures of a run."""


class InputError(ValueError):
    """Data, settings or a directory that kbatch cannot use as given; it says what to give."""
