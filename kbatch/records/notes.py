"""Notes: facts that may change what a user does. A note has a code, values and a text.

The notes of a result are listed in the order of their importance, which is the order of `KINDS`. A
study shows all its notes. Any other result shows the first three.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self

Value = bool | int | float | str | None
# No page, table or terminal can show surrogates or control characters other than white space.
_UNPRINTABLE = re.compile("[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def printable(text: str) -> str:
    """Replace characters that cannot be shown, such as bytes of a file name that is not UTF-8."""
    return text if text.isprintable() else _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


class Note(str):
    """The text of a note, with its code and the values in it."""

    code: str
    values: Mapping[str, Value]

    @classmethod
    def of(cls, code: str, /, **values: Value) -> Self:
        """Make a note from its code and values."""
        kind = KINDS[code]
        # `more` is an optional sentence.
        text = kind.format(**{"more": ""} | values) if isinstance(kind, str) else kind(**values)
        note = cls(printable(text))
        note.code, note.values = code, values
        return note

    @classmethod
    def from_json(cls, code: str, values: Mapping[str, Value]) -> Self:
        return cls.of(code, **values)

    def to_json(self) -> object:
        return {"code": self.code, "values": self.values}


def _parts_differ(found: str, source: str | None = None) -> str:
    advice: dict[str | None, str] = {
        "layer": " For an exact result, train without micro-batches.",
        "loss": " If the loss is not divided by the number of rows, pass `loss_denominator` to "
        "`accumulate_gradients`. If the loss compares rows with each other, pass `exact=True`.",
        "state": " The layer changes its state once for each micro-batch, not once for each "
        "update. For an exact result, train without micro-batches.",
        "added": " Let the layer add one loss value for each row, or the mean of these values.",
    }
    return f"Micro-batches change the result of the batch: {found}.{advice.get(source, '')}"


# The process in which memory was measured, by the reason.
_MEASURED_HERE = {
    "gpu": "it already uses the GPU. A new process may give another result. To measure in a new "
    "process, give a build function and arrays, and call kbatch before you create any model, "
    "tensor or `tf.data.Dataset`",
    "replicas": "the model is on several devices. Too large a batch may crash this process",
    "model on the GPU": "it already uses the GPU. Too large a batch may crash this process",
    "not sendable": "the model or the data cannot be sent to a new one. On a CPU, small blocks of "
    "memory are not counted, and too large a batch may crash this process",
}

# Why a search is a grid although `strategy="race"` was given.
GridReason = Literal["several_objectives", "returned_number", "time", "own_fit"]
_NO_RACE: Mapping[GridReason, str] = {
    "several_objectives": "it has several objectives, and a race compares one metric",
    "returned_number": "its `fit` returns the objective, and a race needs a metric of Keras",
    "time": "its objective is a time, and a race compares a metric such as accuracy or loss",
    "own_fit": "a race cannot set the learning rate of a HyperModel with its own `fit`",
}

# The text of each code: a template with its values in braces, or a function that makes the text.
KINDS: dict[str, str | Callable[..., str]] = {
    "depends_on_size": (
        "Predictions depend on other rows of the batch ({setting}): outputs {found}. Look for "
        "BatchNormalization with `training=True`, dynamic quantisation or overflow."
    ),
    "target_not_verified": lambda longer=False, why="missed": (
        "No batch size was verified for the latency target"
        + (" before the time budget ended: " if longer else ": ")
        + {
            "missed": "further calls missed the target",
            "no calls": "no further calls were made",
        }.get(why, f"further calls met the target only {why}")
        + (". Give a larger `time_budget_s` (--seconds)" if longer else ". Give a higher target")
        + ", or measure again on a quieter machine."
    ),
    "busy_while_timed": (
        "For batch size {size}, the table and a later check differ on whether the target is met, "
        "because the machine was busier {when}. The answer is based on the check."
    ),
    "policy_not_measured": "Not measured under {policy}: {reason}.",
    "not_quantised": (
        "Under int8, {quantised} of {layers} layers with weights are quantised. The others "
        "compute in float32: {others}."
    ),
    "peaks_differ": (
        "Peak memory differs from run to run: {refuted} sizes fit once, but not again. The "
        "reported size may not fit again either: use a smaller size, or lower `memory_window`."
    ),
    "gpu_shared": (
        "Other processes use memory of the GPU (`nvidia-smi` names them), so {free} of {total} "
        "were left. Measure again on a free GPU."
    ),
    "measured_here": lambda why: (
        f"Memory was measured in this process, because {_MEASURED_HERE[why]}."
    ),
    "input_cache_unfilled": (
        "The pipeline's `cache` was not filled before measuring ({reason}). The throughput may be "
        "that of a first epoch, and later epochs may be faster."
    ),
    "map_calls_python": (
        "`map` calls a Python function ({names}), which threads do not speed up. Use TensorFlow "
        "operations, or do the work once before training."
    ),
    "rows_differ": (
        "Rows of the dataset differ in length. kbatch used the longest of the first {elements} "
        "elements: if there are longer ones, give one as `longest_example`."
    ),
    "inputs_made": "Inputs are random. For real ones, call `kbatch.profile_inference(model, x)`.",
    "rate_rises": (
        "Batch size {size:,}, the largest that was tried, had {gain} times the throughput of batch "
        "size {before:,}. Give larger batch sizes to find the peak."
    ),
    "data_end": (
        "This size is the whole dataset. To try larger sizes by repeating one example, give "
        "`longest_example=(x[0], y[0])`, or `({{k: x[k][0] for k in x}}, y[0])` if `x` is a dict."
    ),
    # Notes of a search: limits of its answer, then advice for a better one.
    "trials_missing": (
        "Trials are missing ({count:,}): their files are damaged or lost. The best may be missing."
    ),
    "left_out": "Left out: {first}",
    "to_be_certain": "{how}.",
    "coarse_target": (
        "The time to the target is measured in whole epochs, which is too coarse to compare sizes. "
        "For shorter epochs, give a smaller `steps_per_epoch`."
    ),
    "same_start": "All runs {began}, so the effect of another {what} is not known.",
    "callbacks_needed": "A callback ended runs of this size. Give it to the final `fit` as well.",
    "split_by_class": (
        "The labels are sorted by class, and `validation_split` takes the last rows: {what}. "
        "Shuffle: `i = np.random.default_rng(0).permutation(len(y)); x, y = x[i], y[i]`."
    ),
    "objective_of_training": (
        "Sizes were compared by `{name}` of the training data, although there are validation data. "
        'To use the validation data, give `BatchSizeTuner(build, "val_{name}")`.'
    ),
    "data_not_finite": (
        "The data are not finite: {found} are NaN or infinite. Remove or replace these values, "
        "because a lower learning rate does not help."
    ),
    "part_not_finite": (
        "Under {policy}, {part} turns finite data into NaN or infinity {when}. Check this part."
    ),
    "float16_overflows": (
        "Float16 overflows under {policy}: {how}. Scale the data to below 65,504, the largest "
        'float16 number, or give `dtype_policy="float32"`.'
    ),
    "updates_rounded": (
        "Under {policy} the weights have 16 bits, which rounds most small updates to zero. "
        'Give `dtype_policy="mixed_bfloat16"`, which keeps the weights in float32.'
    ),
    "another_batch_size": (
        "The search asked for batch size {asked:,}, but the train step received at most {seen:,} "
        "examples at once. Read this trial as batch size {seen:,}."
    ),
    "rate_off": (
        "Your learning rate, {rate} at batch size {base}, {seems} too {far}. {when} {epochs} at "
        "batch size {size}, {words} was {values}, a difference larger than the noise.{more}"
    ),
    "grid_because": lambda why: (
        f"The search is a grid, because {_NO_RACE[why]}. A grid does not tune the learning rate."
    ),
    "shown_better": (
        "In the table, {sizes} did better than {named}, but a curve fitted to all runs prefers "
        "{named}. More training runs would show which is right."
    ),
    "sizes_not_compared": (
        "Batch sizes were not compared, because fewer than two were trained to the end. Run the "
        "same script again with a larger {limits} to continue.{measured}"
    ),
    "rate_unchecked": (
        "Your learning rate, {rate} at batch size {size}, was not checked. "
        '`strategy="race"` looks for a better one.{more}'
    ),
    "no_rule": (
        "kbatch does not scale the learning rate of {optimizer} with the batch size. To scale it, "
        'use `hp.get("batch_size")` in `build`, or give `learning_rate_scaling`.'
    ),
    "rates_by_callback": (
        "{who} set the learning rate of each epoch ({ends}), so kbatch cannot compare rates. Use a "
        "schedule instead, or let the callback multiply the current rate."
    ),
    "lagging_statistics": (
        "Training accuracy is far above validation accuracy at {sizes} ({training} and "
        "{validation} at {at}). After {updates}, {what} may lag behind, because they average over "
        "{memory} updates: train longer, or lower {cure}."
    ),
    "still_rising": (
        "The {words} still improved by {gain} over the last {last}. In the search, train longer, "
        "because the best batch size may change."
    ),
    "end_of_range": (
        "Batch size {size} is the {end} that was tried, and {why}, so a {other} one may be {may}. "
        "Add {other} `batch_sizes`, such as {next}, and run the script again: the search continues."
    ),
    "input_binds": (
        "Training waits for data {when}, so samples/s show the speed of the input pipeline. "
        "`kbatch.profile_input_pipeline` tries ways to make it faster."
    ),
    "search_the_sizes": (
        "To find which size trains best, at which learning rate, and whether XLA helps, use "
        "`kbatch.BatchSizeTuner` with `batch_sizes=[{sizes}]`."
    ),
    "memory_binds": "Memory is the limit: {how}.",
    "updates_bind": (
        "Larger batches trained up to {gain} times as fast, but made fewer updates and reached a "
        "worse {words}. To compare sizes at equal time, use `kbatch.TimeBudget`."
    ),
    "noise_binds": (
        "A batch size above the gradient noise scale, about {scale} examples, saves few updates, "
        "because the gradient has little noise there."
    ),
    "failure_rate": (
        "At a learning rate near the recommended one, training with batch size {failed} {how}. "
        "{trainings} succeeded, but up to {rate} of further runs may fail (95 % confidence)."
    ),
    "times_corrected": (
        "Training times and samples/s in tables and figures are corrected for changes of the "
        "machine's speed during the search. Without this correction, {times}."
    ),
    "times_scatter": (
        "Batch size {base} takes {ratio} times as long as {size} (interval {low} to {high}), so "
        "either size may be the faster one."
    ),
    "devices_differ": "Trials ran on {devices}. Compare speeds on one kind of device only.",
    "shared_device": (
        "Up to {workers} workers shared the device, so each of them trained more slowly. To "
        "compare sizes by speed, search again with one worker for each device."
    ),
    "also_set": "`decision.apply` also sets {settings}.{more}",
    "base_added": (
        "kbatch assumes your learning rate suits batch size {size}, so it tries that size too. "
        "If the rate suits another size, give that size as `base_batch_size`."
    ),
    "batches_cut": "Batches are cut into micro-batches of {size} examples.",
    "batches_whole": "Batches of up to {size} examples were not cut into micro-batches.",
    "batch_normalization_in_parts": (
        "A layer normalizes each micro-batch instead of the whole batch: {parts}. Use "
        "GroupNormalization, LayerNormalization, or a micro-batch as large as the batch."
    ),
    "parts_differ": _parts_differ,
    "parts_not_compared": "It was not checked whether micro-batches change the result: {found}.",
    "cut_to_fit": "Only {size} examples fit in memory, so micro-batches have at most {size}.{more}",
    "memory_ran_out": (
        "Memory ran out in training with micro-batches of {before} examples. Later runs use at "
        "most {after}: do not compare their samples/s with earlier runs."
    ),
    "own_step_whole": (
        "Batches were not cut into micro-batches of {size}: the model has a custom `train_step`. "
        "Move its loss to `compute_loss`, or use `accumulate_gradients(exact=True)`."
    ),
    "first_learning_rate": (
        "The first update used learning rate {used:.3g}, set by {by}, not the model's {built:.3g}."
    ),
    "compiled_by_xla": "With `jit_compile=True`, train steps are {speedup} times as fast.",
    "one_step_an_execution": "`steps_per_execution` is 1, although more is often faster: {reason}.",
    "too_short_to_time": "A training run had fewer than four steps, too few to measure samples/s.",
    "metrics_of_parts": (
        "These metrics are averages over micro-batches, because they are plain functions: {names}. "
        "Use a `keras.metrics.Metric` to get the value of the whole batch."
    ),
    "auc_thresholds": (
        "AUC treats all predictions below {first:.2g} alike, and {share} of the positive examples "
        "have such predictions: use `AUC(thresholds=np.geomspace(1e-6, 0.999, 200).tolist())`."
    ),
    "most_common_class": (
        "The {words} of {value} is not above the share of the most common class, {share}. Choose "
        "an objective such as `val_auc`, or give `class_weight`."
    ),
    "blocks_lack_a_class": (
        "kbatch estimates noise from {blocks} blocks of validation examples, but {lacking} of them "
        "lack a class. Shuffle or use more examples: a single one can change the metric by {step}."
    ),
    "nothing_timed": "Training did not go through `model.fit`, so nothing was timed or counted.",
    "float32_instead": (
        "Trained in float32, not under {policy}: {reason}. To train under {policy} anyway, give "
        '`BatchSizeHyperModel(build, batch_sizes, dtype_policy="{policy}")`.'
    ),
    "half_slower": (
        "Under {policy} an update takes {ratio} as in float32 on this processor. To train faster, "
        'give `BatchSizeHyperModel(build, batch_sizes, dtype_policy="float32")`.'
    ),
    "data_not_copied": (
        "The `PyDataset` cannot be copied ({error}), so each run gets it as the previous run left "
        "it. Give a function `batch_size -> PyDataset`, which makes a new one."
    ),
    "own_path": "`{callback}` writes one file for each trial: {own} instead of {given}.",
    # Reasons, each the end of a sentence: why a search for memory ended at its size.
    "in_window": "its memory is within `memory_window`",
    "reached_data": "it is the whole dataset",
    "reached_most": "it is `max_batch_size`",
    "memory_hardly_grows": "memory hardly grows with the batch size, so no limit was found",
    "one_example_above": "one example needs {needs}, above `memory_window`",
    "next_above": "batch size {below} needs {needs} of memory, and {above} {reached}",
    "memory_jumps": "memory jumps: batch size {below} needs {needs}, and {above} {reached}",
    # Why a batch size was not run, or has no result.
    "out_of_memory": "out of memory",
    "beyond_target": "batches take longer than the latency target",
    "beyond_bulk_call": 'more than the {examples} examples of a "predict" call (`bulk_examples`)',
    "warm_up_time_spent": "preparing other sizes took half of the time budget",
    "too_slow_to_time": "too slow for the time budget",
    "one_step_as_fast": "one step at a time is as fast as several would be",
    "memory_expected": "expected to need {expected}, more than {share:.0%} of {limit}",
    "memory_time_spent": "the time for memory measurements was used up",
    "memory_ran_out_at": "memory ran out at batch size {size}",
    "data_gave_fewer": "the data function gave {rows} examples",
    # Why a limit of the batch size is not known.
    "cannot_measure": "{error}",
    "data_ended": "the data ended within a batch, after {rows}",
    "ran_out_of_memory": "it ran out of memory",
    "nothing_ran": "not even the smallest batch size could be run",
    # Why a change to an input pipeline was not tried, or what it requires.
    "no_time_for_changes": "trying all takes about {needed} s, above half of `time_budget_s`",
    "change_failed": "failed: {error}",
    "data_error": "the data raised an error: {error}",
    "has_prefetch": "the pipeline ends with `.prefetch()`",
    "has_cache": "the pipeline has a `.cache()`",
    "no_serial_map": "no serial `map` is followed only by batch, prefetch, shuffle or repeat",
    "cache_freezes": "a cache would repeat random values; place `.cache()` before the random part",
    "endless_data": "the data repeat without end; place `.cache()` before `.repeat()`",
    "cache_too_large": "the cache takes more than the {most} of `cache_bytes`",
    "cache_not_full": "the cache was not full after {seconds:.2g} s: give a larger `time_budget_s`",
    "worker_per_core": "there is already one worker for each core",
    "threads_share_lock": "the function calls Python, which runs in one thread at a time",
    "called_by_threads": "several threads call the function; random numbers come in another order",
    "rows_by_threads": "`__getitem__` may be called from several threads at once",
    "cache_takes": "{size} of memory; the first epoch is as slow as before",
}


def by_importance(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return each note once, the most important first."""
    order = list(KINDS)
    return tuple(sorted(dict.fromkeys(notes), key=lambda note: order.index(note.code)))


def most_important(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return the first three notes by importance, which a result shows."""
    return by_importance(notes)[:3]
