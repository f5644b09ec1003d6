"""What `fit` is given, by name."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kbatch.training.data.training_data import TrainingData

_SIGNATURE = inspect.signature(keras.Model.fit)
_DATA = tuple(field.name for field in dataclasses.fields(TrainingData))


class FitCall:
    """The arguments of one call of `fit`."""

    def __init__(self, arguments: Sequence[Any], keywords: Mapping[str, Any]):
        """Bind arguments to the signature of `keras.Model.fit`.

        Raises:
            TypeError: If that does not take them.
        """
        self.arguments, self.keywords = arguments, keywords
        bound = _SIGNATURE.bind(None, *arguments, **keywords)
        bound.apply_defaults()
        del bound.arguments["self"]
        self.named: Mapping[str, Any] = bound.arguments  # All, with the defaults of Keras.

    @classmethod
    def of_search(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> "FitCall":
        """Bind the arguments of a search, whose `HyperModel.fit` may take others than Keras's."""
        try:
            return cls(arguments, keywords)
        except TypeError:
            call = cls((), {})
            call.arguments, call.keywords = arguments, keywords
            places = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            call.named = places | dict(keywords)
            return call

    @property
    def data(self) -> TrainingData:
        return TrainingData(**{name: self.named[name] for name in _DATA if name in self.named})

    @property
    def callbacks(self) -> list[Any]:
        return keras.tree.flatten(self.named.get("callbacks") or [])

    def without(self, *names: str) -> dict[str, Any]:
        """Return what was given beside the data and these."""
        left_out = (*_DATA, *names)
        return {name: value for name, value in self.named.items() if name not in left_out}
