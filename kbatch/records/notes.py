"""What changes what a reader does: a code with values, worded here and nowhere else.

The notes of all results stand here in the order of their importance. A result shows three; those
of a training run stand in the report of a study, which names the trials that they concern.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

from kbatch.records.json_codec import decode, printable

Value = bool | int | float | str | None


class _Kind(NamedTuple):
    """One kind of note."""

    label: str = ""  # What it is about in a few words, for a note on a training run,
    column: str = ""  # and the column of the trials' table whose numbers it concerns.
    # With the names of values in braces, or made from these.
    text: str | Callable[..., str] = ""


class Note(str):
    """A note: the text, with the code and the values it was made of."""

    code: str
    values: Mapping[str, Value]

    @classmethod
    def of(cls, code: str, /, **values: Value) -> Self:
        """Make a note from its code and values."""
        made = KINDS[code].text
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
        return KINDS[self.code].label

    @property
    def column(self) -> str:
        """The column of the trials' table whose numbers it concerns."""
        return KINDS[self.code].column


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


def _measured_here(why: str) -> str:
    reasons = {
        "gpu": "which holds the GPU already, and so not confirmed in a fresh one. A model, a "
        "tensor or a `tf.data.Dataset` made here takes the GPU: for a measurement in a process of "
        "its own give a build function, and arrays or a function `batch_size -> Dataset`, before "
        "anything else uses TensorFlow.",
        "replicas": "on as many replicas as train: a batch far too large may end this process, and "
        "the answer is not confirmed in a fresh one.",
        "not sendable": "since the model or the data cannot be sent to a worker process: "
        "a batch far too large may end this process, small blocks of memory are not counted on a "
        "CPU, and the answer is not confirmed in a fresh process.",
    }
    return f"Measured in this process, {reasons[why]}"


_SIZE = ("micro-batch size", "micro_batch_size")
_CUT = ("batch cut in micro-batches", "quality")
_STEPS = ("steps of an execution", "samples_per_second")
_RATE = ("learning rate", "learning_rate")
KINDS = {
    "peaks_differ": _Kind(
        text="Peaks differ from run to run: {refuted} sizes in a row were refuted when they were "
        "run again, and the next one was run once. Leave a wider margin below the limit."
    ),
    "gpu_shared": _Kind(
        text="{neighbours} Memory and speed were measured beside that: measure again on a free GPU."
    ),
    "measured_here": _Kind(text=_measured_here),
    "input_batches_differ": _Kind(
        text="Batches differ in size: the second half of those read holds {grown:.2g} times as "
        "much as the first, those trained on {trained:.2g} times as much as the mean. The verdict "
        "is that of these batches."
    ),
    "input_cache_unfilled": _Kind(
        text="The pipeline's own cache was not filled first ({reason}): these may be the rates of "
        "the first epoch, and later ones faster."
    ),
    "input_one_step": _Kind(
        text="`fit` runs {steps} steps of this model in one execution; here each was started by "
        "itself, so training may wait longer for data in `fit`."
    ),
    "input_contended": _Kind(
        text="Together pipeline and train step are slower than one after the other: they want the "
        "same cores, or Python code in one holds up the other."
    ),
    "input_crossing": _Kind(
        text="Up to about batch size {size:,} ({low:,} to {high:,}) the train step is slower, "
        "above it the pipeline, if an example takes that as long at other sizes."
    ),
    "rows_differ": _Kind(
        text="Rows of the dataset differ in length: the longest of the first {elements} elements "
        "was used. If there are longer ones, put one first or, where there is such an argument, "
        "give it as `longest_example`."
    ),
    "data_end": _Kind(
        text="The data set ended the search: to search beyond it, give "
        "`longest_example=(x[0], y[0])` to `find_max_batch_size`."
    ),
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
_MOST_SHOWN = 3


def most_important(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return the notes that a result shows: each once, in the order of their importance."""
    order = list(KINDS)
    ranked = sorted(dict.fromkeys(notes), key=lambda note: order.index(note.code))
    return tuple(ranked[:_MOST_SHOWN])
