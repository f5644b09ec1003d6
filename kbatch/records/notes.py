"""Notes on a training run: a code with values, worded here and nowhere else."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from kbatch.records.json_codec import decode, printable

Value = bool | int | float | str | None


class _Kind(NamedTuple):
    """One kind of note: what it is about, the column of the trials' table, and its text."""

    label: str
    column: str
    text: str | Callable[..., str]  # With the names of values in braces, or made from these.


class RunNote(str):
    """A note on a training run: the text, with the code and the values it was made of."""

    code: str
    values: Mapping[str, Value]

    @classmethod
    def of(cls, code: str, /, **values: Value) -> Self:
        """Make a note from its code and values."""
        made = _KINDS[code].text
        # Some notes have a further sentence.
        text = made.format(**{"more": ""} | values) if isinstance(made, str) else made(**values)
        note = cls(printable(text))
        note.code, note.values = code, values
        return note

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Read a note of a file."""
        return cls.of(decode(str, found["code"]), **decode(Mapping[str, Value], found["values"]))

    def to_json(self) -> object:
        """Return what a file holds of it."""
        return {"code": self.code, "values": self.values}

    @property
    def label(self) -> str:
        """What it is about, in a few words."""
        return _KINDS[self.code].label

    @property
    def column(self) -> str:
        """The column of the trials' table whose numbers it concerns."""
        return _KINDS[self.code].column


def _parts_differ(found: str, source: str | None = None) -> str:
    advice: dict[str | None, str] = {
        "layer": " A micro-batch as large as the batch is exact.",
        "loss": " If the loss is divided by something other than the number of rows, pass "
        "`loss_denominator` to `accumulate_gradients`; if it relates rows, pass `exact=True`.",
        "state": " The layer takes it on once a micro-batch, not once an update. A micro-batch as "
        "large as the batch is exact.",
        "added": " Let the layer add one value for each row, or their mean.",
    }
    cut = "Not equal to the whole batch when it is cut into parts"
    return f"{cut}: {found}.{advice.get(source, '')}"


_SIZE = ("micro-batch size", "micro_batch_size")
_CUT = ("batch cut in micro-batches", "quality")
_STEPS = ("steps of an execution", "samples_per_second")
_RATE = ("learning rate", "learning_rate")
_KINDS = {
    "batch_normalization_in_parts": _Kind(
        "BatchNormalization in micro-batches",
        "quality",
        "Not equal to the whole batch, since computed on each micro-batch by itself: {parts}. "
        "Use GroupNormalization or LayerNormalization, or a micro-batch as large as the batch, "
        "for an exact large batch.",
    ),
    "parts_differ": _Kind(*_CUT, _parts_differ),
    "parts_not_compared": _Kind(*_CUT, "Not known to be equal to the whole batch: {found}."),
    "cut_to_fit": _Kind(
        *_SIZE,
        "At most {size} examples fit in memory at once ({reason}), so larger batches go through in "
        "micro-batches.{more}",
    ),
    "memory_ran_out": _Kind(
        *_SIZE,
        "Memory ran out in training with micro-batches of {before}: from plan {plan} on they have "
        "at most {after} examples. Compare samples/s of sizes within one plan.",
    ),
    "own_step_whole": _Kind(
        *_SIZE,
        "Batches went through whole, not in micro-batches of {size}: the model has its own "
        "`train_step`. To cut them, move its loss into `compute_loss`, or let the build function "
        "call `accumulate_gradients` with `exact=True`.",
    ),
    "first_learning_rate": _Kind(
        *_RATE,
        "The first update used the learning rate {used:.3g}, not the {built:.3g} that the model "
        "was built with: a callback or the tuner's `optimizer` set it.",
    ),
    "fitted_by_build": _Kind(
        *_RATE,
        "`build` fits {names} to the batch size by itself, so the search left that as it is.",
    ),
    "steps_by_build": _Kind(
        *_STEPS,
        "`build` sets `steps_per_execution={steps}` by itself, so the search left that as it is.",
    ),
    "one_step_an_execution": _Kind(
        *_STEPS, "Keras started each step by itself, which takes longer: {reason}."
    ),
    "too_short_to_time": _Kind(
        "too short to time",
        "samples_per_second",
        "Too short to time: samples/s need three steps after the first one of each size.",
    ),
    "resumed": _Kind(
        "rest of a training",
        "updates",
        "It went on from epoch {epoch} of another trial: counts and times are those of the rest.",
    ),
    "embedding_summed": _Kind(
        "embeddings",
        "quality",
        "The gradient of an embedding was added up over equal indices before the optimizer saw "
        "it, at every size. A plain `fit` squares the rows of a repeated index one by one and "
        "takes other steps.",
    ),
    "metrics_of_parts": _Kind(
        "metrics in micro-batches",
        "quality",
        "A mean over micro-batches, not over batches: {names}, since its function returns one "
        "value for all rows that it is given.",
    ),
    "nothing_timed": _Kind(
        "nothing timed",
        "samples_per_second",
        "Training did not go through `model.fit`: nothing was timed or counted.",
    ),
    "float32_instead": _Kind(
        "dtype policy",
        "quality",
        "Trained in float32, not under {policy}: {reason}. To train under it all the same, give "
        '`dtype_policy="{policy}"`.',
    ),
    "compiled_late": _Kind(
        "compiled late",
        "batch_size",
        "The model was not compiled when it was built, so batches were not cut and the "
        "optimizer's settings did not follow the batch size.",
    ),
    "loss_a_row": _Kind(
        "training loss",
        "quality",
        "`loss` is a sum over the batch, so it was divided by the batch size to make sizes "
        "comparable.",
    ),
    "validation_shuffled": _Kind(
        "order of validation data",
        "quality",
        "The validation data have another order in each trial, so sizes cannot be compared "
        "example by example and need more executions: do not shuffle them.",
    ),
    "own_path": _Kind(
        "file of each trial",
        "batch_size",
        "`{callback}` writes a file for each trial: {own} in place of {given}.",
    ),
}
