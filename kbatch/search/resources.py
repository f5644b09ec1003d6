"""What an execution needs of a node, by the memory that a first task measured, and how to ask."""

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from kbatch.memory.find import find_max_batch_size
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.records.json_codec import write_record

MEMORY_NAME = "kbatch-memory.json"
# Peaks of one size differ by as much between processes.
_MARGIN = 1.25
# Of the engine's own process, and of what a search holds beside a train step.
_BESIDE_BYTES = 2**29
# What SLURM says of a job that no node can run.
TOO_LARGE = re.compile("configuration is not available|specification can not be satisfied")


class Resources(NamedTuple):
    """What an execution needs of a node, with a margin."""

    gpus: int
    gpu_memory_bytes: int  # 0 without a GPU.
    host_memory_bytes: int
    time_limit_s: float | None  # None before an execution has completed.


@dataclasses.dataclass(frozen=True)
class MeasuredMemory:
    """What train steps took on a node of the engine."""

    steps: MaxBatchSizeResult
    host_bytes: int  # Most that their process held in RAM.

    def needed(
        self, batch_size: int, given: Any, *, longest_s: float | None, times: int
    ) -> Resources:
        """Return what an execution needs, `given` the micro-batch size of its hypermodel."""
        # Under "auto" all of a batch where that fits, else as much as fits.
        cut = given == "auto" and self.steps.memory_bound
        most = self.steps.max_batch_size if cut else given
        at_once = min(batch_size, most) if isinstance(most, int) else batch_size
        line = self.steps.predict if self.steps.fit else lambda _: self.steps.peak_memory_bytes
        peak, largest = (
            self.steps.memory_bytes.get(size) or max(line(size), self.steps.weights_bytes)
            for size in (at_once, self.steps.max_batch_size)
        )
        if at_once < batch_size:  # The sum of the gradients.
            peak += self.steps.weights_bytes
        on_gpu = self.steps.device.startswith("GPU")
        host = self.host_bytes if on_gpu else max(peak, self.host_bytes + peak - largest)
        return Resources(
            gpus=int(on_gpu),
            gpu_memory_bytes=math.ceil(times * _MARGIN * peak) if on_gpu else 0,
            host_memory_bytes=math.ceil(times * (_MARGIN * host + _BESIDE_BYTES)),
            # Others may train several times as long, and wait for their start.
            time_limit_s=None if longest_s is None else times * (4 * longest_s + 600),
        )


def measure_memory(tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Measure the memory of train steps up to the largest that trials run, and keep it."""
    call = inspect.signature(keras.Model.fit).bind(None, *arguments, **keywords).arguments
    hypermodel, hp = tuner.hypermodel, tuner.oracle.get_space().copy()
    largest = hp.values["batch_size"] = hypermodel.batch_sizes[-1]
    most = min(largest, given) if isinstance(given := hypermodel.micro_batch_size, int) else largest
    data = call["x"], call.get("y")
    found = find_max_batch_size(lambda: hypermodel.build(hp), *data, max_batch_size=most)
    resource = importlib.import_module("resource")  # Not on Windows.
    host_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    write_record(MeasuredMemory(found, host_bytes), Path(tuner.project_dir) / MEMORY_NAME)


def ask_submitit(executor: Any, needed: Resources) -> Any:
    """Set what an executor of submitit asks for, from the next job on."""
    asked = {"mem_gb": math.ceil(needed.host_memory_bytes / 2**30)}
    asked |= {"gpus_per_node": needed.gpus} if needed.gpus else {}
    if needed.time_limit_s is not None:
        asked["timeout_min"] = math.ceil(needed.time_limit_s / 60)
    executor.update_parameters(**asked)
    return executor
