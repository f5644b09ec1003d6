"""The number of the execution that a trial comes to next."""

import keras_tuner


class ExecutionNumber:
    """Follows which execution of which trial is under way.

    keras-tuner executes a trial several times with one object of hyperparameters, and tells the
    number to nobody: it is known by that object, as long as every execution before it ended well.
    """

    def __init__(self):
        self._hp: keras_tuner.HyperParameters | None = None
        self._ended = 0

    def of(self, hp: keras_tuner.HyperParameters) -> int:
        """Gives the number of the execution that `hp` comes to next, from 0."""
        return self._ended if hp is self._hp else 0

    def begin(self, hp: keras_tuner.HyperParameters, number: int) -> None:
        """Sets the number of the execution that `hp` comes to next."""
        self._hp, self._ended = hp, number

    def failed(self) -> None:
        """Notes that a build or a run failed: what comes next begins anew."""
        self._hp, self._ended = None, 0

    def ended(self, hp: keras_tuner.HyperParameters, *, planned: int) -> None:
        """Notes that an execution ended well, of `planned` ones."""
        self._hp, self._ended = hp, (self.of(hp) + 1) % planned
