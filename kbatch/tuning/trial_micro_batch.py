"""The micro-batch size of one trial under "auto"."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kbatch.profiling.loads import Source, build_on
from kbatch.training.accumulation import cut_batches
from kbatch.training.data import FitData
from kbatch.training.kept_state import KeptState
from kbatch.training.replica_meter import replica_count
from kbatch.tuning.auto_micro_batch import AutoMicroBatch


class TrialMicroBatch:
    """Finds the micro-batch size when the data are known, and halves it when it was too large.

    Args:
        auto: Finds sizes, and remembers them.
        model: The model of the trial.
        build: Builds it anew.
        batch_size: Examples of one optimizer update.
        moments_every: As in `accumulate_gradients`.
        directory: Where results are kept, or None.

    Attributes:
        size: Examples that go through a device at once; None before it is known.
        most_in_memory: Most examples that fit, None where more were not found not to.
        search_s: Seconds that the search took, or None.
        notes: What a reader of the figures must know.
    """

    def __init__(
        self,
        auto: AutoMicroBatch,
        model: keras.Model,
        build: Callable[[], keras.Model],
        *,
        batch_size: int,
        moments_every: int,
        directory: Path | None,
    ):
        self.size: int | None = None
        self.most_in_memory: int | None = None
        self.search_s: float | None = None
        self.notes: list[str] = []
        self._auto = auto
        self._model = model
        self._build = build
        # A batch is shared by the replicas of a strategy.
        self._rows = -(-batch_size // replica_count(model))
        self._moments_every = moments_every
        self._directory = directory
        self._key, self._most = "", batch_size
        self._state: KeptState | None = None

    def prepare(self, data: FitData, *, verbose: bool) -> int:
        """Finds the size, the first time, and makes the model accumulate.

        Args:
            data: Arguments of `fit`.
            verbose: Whether to print a search for the size, which takes a while.

        Returns:
            Most examples that go through the device at once.

        Raises:
            OutOfMemoryError: If one example does not fit.
        """
        if self.size is None:
            source = self._auto.data.source(data, self._model)
            model: Any = self._model
            with model.distribute_strategy.scope():
                build_on(self._model, source)
                self._state = KeptState(self._model)
            found = self._auto.find(
                self._model,
                self._build,
                source=source,
                directory=self._directory,
                rows=self._rows,
            )
            if verbose and found.search_s:
                print(f"micro-batch size: {' '.join(found.notes)}", flush=True)
            self._key, self._most, self.size = found.key, found.most, found.size
            self.most_in_memory = found.most if found.memory_bound else None
            self.search_s = found.search_s
            self.notes.extend(found.notes)
            self._accumulate(self.size)
        return self._most

    def most_at_once(self, source: Source) -> int:
        """Finds the most examples that fit at once.

        Args:
            source: The data of the model, which is built on them.

        Returns:
            The most examples on one device.

        Raises:
            InputError: If the memory limit is below what the weights take.
            OutOfMemoryError: If one example does not fit.
        """
        return self._auto.most(self._model, self._build, source=source, directory=self._directory)

    def shrink(self) -> bool:
        """Halves the size and puts the model back as it was before training.

        Returns:
            Whether there is a smaller size to go on with.
        """
        before = self.size
        if before is None or self._state is None:
            return False  # Memory ran out before training: a smaller one is no cure.
        smaller = self._auto.halve(self._key, before, self._directory)
        if smaller is None:
            return False
        self._state.restore()
        self.size = self._most = self.most_in_memory = smaller
        self._accumulate(smaller)
        self.notes.append(
            f"Memory ran out in training with micro-batches of {before}: the trial started again, "
            f"with the same seed and batch size, with micro-batches of {smaller}."
        )
        return True

    def _accumulate(self, size: int) -> None:
        cut_batches(self._model, size, rows=self._rows, moments_every=self._moments_every)
