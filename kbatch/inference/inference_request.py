"""What a profile of inference is asked for, checked before anything is measured."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.quantile_bounds import calls_for_quantile
from kbatch.device.device_memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.inference.call_paths import CallPath, call_paths_of
from kbatch.inference.inference_answers_record import check_target
from kbatch.inference.inference_sweep import SweepPlan
from kbatch.inference.record import BULK_PATH
from kbatch.timing.timing_plan import TimingPlan

_LARGEST_DEFAULT = 4096
# Where throughput still grows there and nobody waits for a batch, sizes go on up to this one.
_LARGEST = 65536
# Share of the time budget for the rounds where an answer is verified afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Default sizes with a target: every third power of two, each timed for a few rounds, since fresh
# calls verify the answer.
_STEP_WITH_TARGET = 3


class InferenceRequest(NamedTuple):
    """What to measure.

    Attributes:
        paths: The call paths.
        plan: Sizes, and when each has been timed enough.
        target_ms: A latency target in milliseconds, None for none.
        quantile: Share of the calls that has to keep to it, in (0, 1).
        time_budget_s: Seconds for timing, and again for the memory of each policy.
        memory_limit_bytes: Memory that may be taken, None for what there is.
    """

    paths: tuple[CallPath, ...]
    plan: SweepPlan
    target_ms: float | None
    quantile: float
    time_budget_s: float
    memory_limit_bytes: int | None


def inference_request(
    model: Any,
    *,
    batch_sizes: Iterable[int] | None,
    call_paths: "str | Callable[..., Any] | Iterable[Any]",
    latency_slo_ms: float | None,
    quantile: float,
    time_budget_s: float,
    bulk_examples: int,
    memory_limit_bytes: int | None,
) -> InferenceRequest:
    """Checks the arguments of `kbatch.profile_inference`, and takes and raises what that does."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model: build or load it first "
            f"(`keras.saving.load_model`). Received: model of type {type(model).__name__}."
        )
    paths = call_paths_of(call_paths)
    target_ms = None if latency_slo_ms is None else _target_ms(latency_slo_ms, quantile, paths)
    needed_calls = calls_for_quantile(quantile)
    budget_s = _budget_s(time_budget_s)
    return InferenceRequest(
        paths,
        _plan(
            batch_sizes,
            target_ms,
            time_budget_s=budget_s,
            needed_calls=needed_calls,
            bulk_examples=check_size(bulk_examples, "bulk_examples"),
        ),
        target_ms,
        float(quantile),
        budget_s,
        check_memory_limit(memory_limit_bytes),
    )


def _target_ms(latency_slo_ms: float, quantile: float, paths: tuple[CallPath, ...]) -> float:
    check_target(latency_slo_ms, quantile)
    if paths[0].name == BULK_PATH:
        raise InputError(
            "A latency target is for batches that come one by one: name another call path "
            f"first. Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
        )
    return float(latency_slo_ms)


def _budget_s(time_budget_s: float) -> float:
    if not isinstance(time_budget_s, numbers.Real) or not 0 < time_budget_s < math.inf:
        raise InputError(
            "`time_budget_s` must be positive, in seconds. "
            f"Received: time_budget_s={time_budget_s!r}."
        )
    return float(time_budget_s)


def _plan(
    batch_sizes: Iterable[int] | None,
    target_ms: float | None,
    *,
    time_budget_s: float,
    needed_calls: int,
    bulk_examples: int,
) -> SweepPlan:
    chosen = batch_sizes is not None
    sizes = check_batch_sizes(batch_sizes) if chosen else powers_of_two(1, _LARGEST_DEFAULT)
    share = 1.0 if target_ms is None else _SHARE_BEFORE_CHECKS
    timing = TimingPlan(time_budget_s=share * time_budget_s, needed_calls=needed_calls)
    if not chosen and target_ms is not None:
        sizes = sizes[::_STEP_WITH_TARGET]
        timing = dataclasses.replace(timing, rounds_beyond=0)
    end_above_s = None if target_ms is None else target_ms / 1000
    goes_on = not chosen and target_ms is None
    larger = powers_of_two(2 * _LARGEST_DEFAULT, _LARGEST) if goes_on else ()
    return SweepPlan(sizes, chosen, end_above_s, bulk_examples, timing, larger)
