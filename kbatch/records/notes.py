"""Notes: what may change what a reader does. Each has a code and values, and its words are here.

The notes of all results are listed in the order of their importance. A study shows all of them,
any other result the first three.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self

Value = bool | int | float | str | None
# What no page, table or terminal can show: halves of characters, and controls but white space.
_UNPRINTABLE = re.compile("[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def printable(text: str) -> str:
    """Replace what cannot be shown, such as the bytes of a file name that is not UTF-8."""
    return text if text.isprintable() else _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


class Note(str):
    """A note: the text, with the code and the values it was made of."""

    code: str
    values: Mapping[str, Value]

    @classmethod
    def of(cls, code: str, /, **values: Value) -> Self:
        """Make a note from its code and values."""
        made = KINDS[code]
        # Some notes have a further sentence.
        text = made.format(**{"more": ""} | values) if isinstance(made, str) else made(**values)
        note = cls(printable(text))
        note.code, note.values = code, values
        return note

    @classmethod
    def from_json(cls, code: str, values: Mapping[str, Value]) -> Self:
        """Make a note of what a file holds."""
        return cls.of(code, **values)

    def to_json(self) -> object:
        """Return the code and the values, which a file holds."""
        return {"code": self.code, "values": self.values}


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
        "model on the GPU": "which holds the GPU already: a batch far too large may end it.",
        "not sendable": "since the model or the data cannot be sent to a worker process: "
        "a batch far too large may end this process, small blocks of memory are not counted on a "
        "CPU, and the answer is not confirmed in a fresh process.",
    }
    return f"Measured in this process, {reasons[why]}"


def _trials_missing(count: int) -> str:
    if count == 1:
        return "1 trial is missing: its record is damaged or lost, and it may have been the best."
    return (
        f"{count:,} trials are missing: their records are damaged or lost, and one of them may "
        "have been the best."
    )


# Why a search is a grid though a race was asked for.
GridReason = Literal["several_objectives", "returned_number", "time", "own_fit"]
_NO_RACE: Mapping[GridReason, str] = {
    "several_objectives": "it has several objectives, and a race compares one metric",
    "returned_number": "its `fit` returns the objective, and a race needs a metric of training",
    "time": "its objective is a time, and a race compares a metric of quality",
    "own_fit": "a race cannot set the learning rate of a HyperModel with its own `fit`",
}


def _grid_because(why: GridReason) -> str:
    return f"The search is a grid, because {_NO_RACE[why]}. It does not check the learning rate."


# Of each code the template, with its values in braces, or the function that words it.
KINDS: dict[str, str | Callable[..., str]] = {
    "depends_on_size": (
        "Predictions depend on the other rows of the batch ({setting}): outputs {found}, more than "
        "rounding explains. A layer mixes the examples, as BatchNormalization with `training=True` "
        "does, takes one scale for a whole batch, as dynamic quantisation does, or overflows."
    ),
    "target_not_verified": lambda longer=False: (
        "The batch size for the latency target is not verified: in fresh calls sizes missed it, or "
        "calls were slow too often to be sure. "
        + ("Measure longer, or on" if longer else "Give a higher target, or measure again on")
        + " a quieter machine."
    ),
    "busy_while_timed": (
        "The table and the fresh calls disagree about the latency target at batch size {size}: the "
        "machine was busier {when}. The fresh calls decide."
    ),
    "policy_not_measured": "Not measured under {policy}: {reason}",
    "not_quantised": (
        "Under int8, {quantised} of {layers} layers with weights are quantised; the others "
        "compute in float32: {others}."
    ),
    "peaks_differ": (
        "Peaks differ from run to run: {refuted} sizes in a row were refuted when they were "
        "run again, and the next one was run once. Leave a wider margin below the limit."
    ),
    "gpu_shared": (
        "Other processes hold memory of the GPU (`nvidia-smi` names them): {free} of {total} were "
        "left. Measure again on a free GPU."
    ),
    "measured_here": _measured_here,
    "input_cache_unfilled": (
        "The pipeline's own cache was not filled first ({reason}): these may be the rates of "
        "the first epoch, and later ones faster."
    ),
    "map_calls_python": (
        "`map` calls a Python function ({names}), which holds the lock of the interpreter: threads "
        "do not speed it up. Write it with TensorFlow operations, or do its work once before "
        "training."
    ),
    "rows_differ": (
        "Rows of the dataset differ in length: the longest of the first {elements} elements "
        "was used. If there are longer ones, put one first or, where there is such an argument, "
        "give it as `longest_example`."
    ),
    "inputs_made": (
        "Inputs were made at random: give `x` where times or outputs depend on their values."
    ),
    "rate_rises": (
        "Throughput still grew by {gain} from batch size {before:,} to {size:,}, the largest that "
        "was tried: give larger `batch_sizes` to find its peak."
    ),
    "data_end": (
        "The data set ended the search: to search beyond it, give `find_max_batch_size` one "
        "example, `longest_example=(x[0], y[0])`, or where `x` is a dict "
        "`longest_example=({{name: x[name][0] for name in x}}, y[0])`."
    ),
    # Of a search: what its answer lacks, then what may give a better answer.
    "trials_missing": _trials_missing,
    "left_out": "Left out: {first}",
    "to_be_certain": "{how}.",
    "coarse_target": (
        "The time to the target is known to one epoch, which is too coarse for the tolerance. "
        "Validate more often: set `steps_per_epoch` to a part of the data."
    ),
    "same_start": "All runs {began}, so the effect of another {what} is not known.",
    "callbacks_needed": "Give `fit` the callbacks of the search too: they ended the trial.",
    "split_by_class": (
        "The labels are sorted by class: {what}. `validation_split` takes the last rows. Shuffle "
        "the rows once before the search, such as by "
        "`order = np.random.default_rng(0).permutation(len(y))`."
    ),
    "objective_of_training": (
        "Sizes were compared by `{name}` of the training data, although there are validation data: "
        'give `BatchSizeTuner(build, "val_{name}")`.'
    ),
    "data_not_finite": (
        "The data are not finite: {found} are NaN or infinite. Remove or replace these values; a "
        "lower learning rate does not help."
    ),
    "part_not_finite": (
        "Under {policy}, {part} makes finite data NaN or infinite {when}: look there before you "
        "lower the learning rate."
    ),
    "float16_overflows": (
        "Float16 overflows under {policy}: {how}. Its largest number is 65,504: scale the data, or "
        'give `dtype_policy="float32"`.'
    ),
    "updates_rounded": (
        "Under {policy} the weights are kept in 16 bits, which rounds most small updates away: "
        'give `dtype_policy="mixed_bfloat16"`, which keeps the weights in float32.'
    ),
    "another_batch_size": (
        "Batch size {asked:,} was asked for, but the train step received at most {seen:,} "
        "examples at once: read this trial as batch size {seen:,}."
    ),
    "rate_off": (
        "Your learning rate, {rate} at batch size {base}, is too {far}. After {epochs} at batch "
        "size {size} the {words} was {values}. Runs that differ by the seed alone are closer.{more}"
    ),
    "grid_because": _grid_because,
    "shown_better": (
        "{sizes}: the table shows at least as good a value and a shorter training time than for "
        "batch size {named}. By all runs together, {named} is still more likely to be within the "
        "tolerance: a race fits one curve to the runs of all batch sizes. More training runs would "
        "show whether that is right."
    ),
    "sizes_not_compared": (
        "Batch sizes were not compared, because fewer than two were trained to the end. Run the "
        "same script again with a larger {limits} to continue.{measured}"
    ),
    "rate_unchecked": (
        "Your learning rate, {rate} at batch size {size}, was not checked: "
        '`strategy="race"` looks for a better one.{more}'
    ),
    "no_rule": (
        "kbatch knows no rule by which the learning rate of {optimizer} follows the batch size, so "
        "the rule left it as it was. To set one, read the size in `build(hp)` with "
        '`hp.get("batch_size")`, or give `learning_rate_scaling`.'
    ),
    "rates_by_callback": (
        "Callbacks set the learning rate: {who}. Epochs ended at {ends}, whatever rate a training "
        "run was given, so no learning rate is named or compared. To compare rates, let the "
        "callback multiply the current rate, or use a schedule in `build`."
    ),
    "lagging_statistics": (
        "Training accuracy is far above validation accuracy at {sizes} ({training} and "
        "{validation} at {at}), and {what} lag: there were {updates}, and they average over the "
        "last {memory} (1 / (1 - momentum)). Before you compare these sizes, train for more "
        "updates or lower {cure}."
    ),
    "still_rising": (
        "The {words} still got better at the end, by {gain} over the last {last}: a longer "
        "training may have another answer."
    ),
    "input_binds": (
        "The input pipeline binds: training waits for data {when}, so the samples/s are those of "
        "the pipeline. `kbatch.profile_input_pipeline` tries what would help."
    ),
    "search_the_sizes": (
        "A search answers which size trains best, at which learning rate, and if XLA pays: "
        "`kbatch.BatchSizeTuner` with `batch_sizes=[{sizes}]`."
    ),
    "memory_binds": "Memory binds: {how}.",
    "updates_bind": (
        "The number of updates binds, not the device: larger batches trained up to {gain} "
        "times as fast, but made fewer updates in the same epochs and reached a worse {words}. "
        "With `kbatch.TimeBudget` all sizes train for one time."
    ),
    "noise_binds": (
        "The gradient noise binds: the batch size lies above the noise scale of {scale} "
        "examples, beyond which a larger batch saves ever fewer updates."
    ),
    "failure_rate": (
        "At this learning rate batch size {failed} {how}. {trainings} did not, so up to {rate} of "
        "training runs there may still fail."
    ),
    "times_corrected": (
        "The training times in the table allow for a machine whose speed changed during the "
        "search, by all runs and the plan together. By their own runs alone: {times}."
    ),
    "times_scatter": (
        "Training times scatter: batch size {base} takes {ratio} times as long as {size} "
        "({low} to {high}), so either may be the faster one."
    ),
    "devices_differ": (
        "Trials ran on different devices: {devices}. Compare samples/s and seconds within one "
        "device only."
    ),
    "shared_device": (
        "The device was shared by up to {workers} workers: samples/s are those of a part of "
        "it. Repeat with one worker a device to compare them."
    ),
    "also_set": "`decision.apply` also sets {settings}.{more}",
    "base_added": (
        "kbatch added batch size {size}, which your learning rate is taken to suit. If another one "
        "does, give `base_batch_size`."
    ),
    "batches_cut": "Batches are cut into micro-batches of {size}.",
    "batches_whole": "Batches of up to {size} went through whole: no accumulation is needed.",
    "batch_normalization_in_parts": (
        "Not equal to the whole batch, since computed on each micro-batch by itself: {parts}. "
        "Use GroupNormalization or LayerNormalization, or a micro-batch as large as the batch, "
        "for an exact large batch."
    ),
    "parts_differ": _parts_differ,
    "parts_not_compared": "Not known to be equal to the whole batch: {found}.",
    "cut_to_fit": (
        "At most {size} examples fit in memory at once ({reason}), so larger batches go through in "
        "micro-batches.{more}"
    ),
    "memory_ran_out": (
        "Memory ran out in training with micro-batches of {before}: from plan {plan} on they have "
        "at most {after} examples. Compare samples/s of sizes within one plan."
    ),
    "own_step_whole": (
        "Batches went through whole, not in micro-batches of {size}: the model has its own "
        "`train_step`. To cut them, move its loss into `compute_loss`, or let the build function "
        "call `accumulate_gradients` with `exact=True`."
    ),
    "first_learning_rate": (
        "The first update used the learning rate {used:.3g}, not the {built:.3g} that the model "
        "was built with: {by} set it."
    ),
    "compiled_by_xla": (
        "Train steps are compiled by XLA, {speedup} times as fast as without: `jit_compile=True`."
    ),
    "one_step_an_execution": "Keras started each step by itself, which takes longer: {reason}.",
    "too_short_to_time": (
        "A training run was too short to measure samples/s: they need three steps after the first."
    ),
    "metrics_of_parts": (
        "Averaged over micro-batches: {names}, because a function returns one value per call. Use "
        "a `keras.metrics.Metric` to get the value of the whole batch."
    ),
    "auc_thresholds": (
        "Keras's AUC does not see the order of small predictions: {share} of the positive "
        "validation examples are predicted below {first:.2g}, the first of its {count} thresholds "
        "above 0. If all predictions are below it, the AUC is 0.5. Give small "
        "`thresholds` to `keras.metrics.AUC`, such as `np.geomspace(1e-6, 0.999, 200).tolist()`."
    ),
    "most_common_class": (
        "The {words} of {value} is not above the share of the most common class, {share}. Choose "
        "an objective such as `val_auc`, or give `class_weight`."
    ),
    "blocks_lack_a_class": (
        "{lacking} of {blocks} blocks of validation examples lack a class, and one example may "
        "change the metric by {step}. If the data are sorted, shuffle them once. If a class is "
        "rare, validate on more of its examples."
    ),
    "nothing_timed": "Training did not go through `model.fit`: nothing was timed or counted.",
    "float32_instead": (
        "Trained in float32, not under {policy}: {reason}. To train under it anyway, give "
        '`BatchSizeHyperModel(build, batch_sizes, dtype_policy="{policy}")`.'
    ),
    "half_slower": (
        "Under {policy} an update takes {ratio} as in float32 on this processor. To train faster, "
        'give `BatchSizeHyperModel(build, batch_sizes, dtype_policy="float32")`.'
    ),
    "data_not_copied": (
        "Each training run reads the `PyDataset` in the state that the run before left, because it "
        "cannot be copied: {error}. Give a function that makes it, `batch_size -> PyDataset`."
    ),
    "own_path": "`{callback}` writes a file for each trial: {own} in place of {given}.",
    # Reasons, each the end of a sentence: why a search for memory ended at its size.
    "in_window": "its memory lies in the window",
    "reached_data": "reached the data set",
    "reached_most": "reached `max_batch_size`",
    "memory_hardly_grows": "one example a byte: memory hardly grows with the batch",
    "one_example_above": "one example needs {needs}, which is above the window",
    "next_above": "{below} need {needs} of memory, and {above} {reached}",
    "memory_jumps": "memory jumps: {below} need {needs} of memory, and {above} {reached}",
    # Why a batch size was not run, or has no result.
    "out_of_memory": "out of memory",
    "beyond_target": "batches beyond the latency target",
    "beyond_bulk_call": "more than the {examples} examples of a bulk call: see `bulk_examples`",
    "warm_up_time_spent": "half of the time budget was spent on preparing and warming up others",
    "too_slow_to_time": "too slow for the time budget",
    "one_step_as_fast": "one step an execution takes as long as several would",
    "memory_expected": "expected to need {expected}, more than {share:.0%} of {limit}",
    "memory_time_spent": "the time for the memory was spent",
    "memory_ran_out_at": "memory ran out at batch size {size}",
    "data_gave_fewer": "the data function gave {rows} examples",
    # Why a limit of the batch size is not known.
    "cannot_measure": "{error}",
    "data_ended": "the data ended after {rows} of a batch",
    "ran_out_of_memory": "it ran out of memory",
    "nothing_ran": "not even the smallest batch size could be run",
    # Why a change to an input pipeline was not tried, or what must hold for it.
    "no_time_for_changes": "no time: all changes take about {needed} s, half of `time_budget_s`",
    "change_failed": "failed: {error}",
    "data_error": "the data raised an error: {error}",
    "has_prefetch": "the pipeline ends with one",
    "has_cache": "the pipeline has one",
    "no_serial_map": "no serial map with only batch, prefetch, shuffle or repeat after it",
    "cache_freezes": "it would freeze what is random; place it before the random part",
    "endless_data": "the data have no end; place it before `.repeat()`",
    "cache_too_large": "it takes more than the {most} of `cache_bytes`",
    "cache_not_full": "it was not full after {seconds:.2g} s: give a larger `time_budget_s`",
    "worker_per_core": "there is one a core already",
    "threads_share_lock": "it calls Python, and one thread at a time holds the interpreter's lock",
    "called_by_threads": "called from several threads; random numbers come in another order",
    "rows_by_threads": "`__getitem__` may be called from several threads at once",
    "cache_takes": "{size} of memory; the first epoch is as slow as before",
}
_MOST_SHOWN = 3


def by_importance(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return each note once, the most important first."""
    order = list(KINDS)
    return tuple(sorted(dict.fromkeys(notes), key=lambda note: order.index(note.code)))


def most_important(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return the notes that a result shows."""
    return by_importance(notes)[:_MOST_SHOWN]
