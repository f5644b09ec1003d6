"""What `fit` is given, by name."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kbatch.training.data.forms import FitData

_SIGNATURE = inspect.signature(keras.Model.fit)


@dataclasses.dataclass(frozen=True)
class FitCall:
    """The arguments of one call of `fit`."""

    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    named: Mapping[str, Any]  # All, by the names of `keras.Model.fit`, with its defaults.

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> "FitCall":
        """Bind arguments to the signature of `keras.Model.fit`.

        Raises:
            TypeError: If that does not take them.
        """
        bound = _SIGNATURE.bind(None, *arguments, **keywords)
        bound.apply_defaults()
        named = {name: value for name, value in bound.arguments.items() if name != "self"}
        return cls(arguments, keywords, named)

    @classmethod
    def of_search(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> "FitCall":
        """Bind the arguments of a search, whose `HyperModel.fit` may take others than Keras's."""
        try:
            return cls.of(arguments, keywords)
        except TypeError:
            places = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            return cls(arguments, keywords, places | dict(keywords))

    @property
    def data(self) -> FitData:
        return FitData(**{name: self.named[name] for name in FitData._fields if name in self.named})

    @property
    def callbacks(self) -> list[Any]:
        return keras.tree.flatten(self.named.get("callbacks") or [])

    def without(self, *names: str) -> dict[str, Any]:
        """Return what was given beside the data and these."""
        left_out = (*FitData._fields, *names)
        return {name: value for name, value in self.named.items() if name not in left_out}
