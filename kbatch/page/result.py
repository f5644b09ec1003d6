"""The base class of all results: an answer, a table, at most three notes, and figures.

The table is a DataFrame whose column names have units, such as "step time (ms)". The columns
"X, low" and "X, high" are the interval of X and are shown after its value. An unknown value is
None, and the column "outcome" (in a study, "verdict") says why. A column without values is not
shown. `table.attrs["answer"]` lists the labels of the rows that the answer names.
`table.attrs["digits"]` gives the significant digits of a column that needs more than three.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from kbatch.records.json_codec import DAMAGED, damaged, read_record, write_record
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kbatch.page.document import Figure

# The module that draws the figures of each result, with its function `figures_of(result)`. It is
# imported when a figure is drawn, because it imports the result's module itself.
FIGURES = {
    "Comparison": "kbatch.study.figures",
    "InferenceProfile": "kbatch.inference.figures",
    "InputPipelineProfile": "kbatch.input_pipeline.figure",
    "MaxBatchSizeResult": "kbatch.memory.figure",
    "Recommendation": "kbatch.recommendation.figure",
    "Study": "kbatch.study.figures",
    "TrainingProfile": "kbatch.throughput.figure",
}


class Result(ABC):
    """The base class of results. Reports, notebooks and the command line use only its members."""

    title: str  # Title, in a few words.
    answer: str  # The decision, in one sentence.
    use: str = ""  # How to use the answer: sentences, then lines of code. Empty if none is needed.
    #: Conditions of the measurement, as texts by name.
    settings: Mapping[str, str] = MappingProxyType({})
    noted: tuple[Note, ...]
    environment: EnvironmentRecord | None  # The machine, None if it was not recorded.

    @abstractmethod
    def table(self) -> "pd.DataFrame":
        """Return the measurements as a table."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three notes, the most important first."""
        return most_important(self.noted)

    def figures(self) -> "tuple[Figure, ...]":
        """Return the figures that can be drawn, beginning with the one that shows the answer."""
        return importlib.import_module(FIGURES[type(self).__name__]).figures_of(self)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the figure that shows the answer on the Axes `ax`, or in a new figure if None."""
        figures = self.figures()
        if not figures:
            raise ValueError(f"There is nothing to draw: {self.answer}")
        return figures[0].draw(ax)

    def save(self, path: Path | str) -> None:
        """Write the result to the JSON file `path`. Missing folders are created."""
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file `path` that `save` wrote; raise `RecordError` if it is damaged."""
        result = read_record(cls, Path(path))
        try:  # Values that contradict each other raise an error when they are shown.
            _ = (str(result), result.use, result.settings, result.figures())
        except DAMAGED as error:
            raise damaged(printable(str(path)), error) from error
        return result

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.answer}>"

    def __str__(self) -> str:
        from kbatch.page.document import table_text

        head = [self.answer, *([self.use] if self.use else [])]
        table = table_text(self.table())
        notes = (f"Note: {note}" for note in self.notes)
        return "\n".join([*head, *(["", table, ""] if table else []), *notes]).rstrip()

    def _repr_html_(self) -> str:
        from kbatch.page.document import notebook_html

        said, *use = self.use.split("\n")
        return notebook_html((self.answer, said), self.table(), use=use, notes=self.notes)
