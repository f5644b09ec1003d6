"""Memory and processors of the host, and what narrows them."""

import os
from collections.abc import Mapping

import psutil

from kbatch.device.control_group import read_control_group
from kbatch.device.examination import Finding
from kbatch.document.number_text import counted, gibibytes

# A worker process with TensorFlow takes about half a GiB before it trains anything.
_LEAST_FREE_BYTES = 2**30
# Timings suffer when others keep more than this share of the processors busy.
_BUSY_SHARE = 0.5
# Variables that change what is measured.
_VARIABLES = (
    "TF_CPU_ALLOCATOR_USE_BFC",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB",
    "TF_GPU_ALLOCATOR",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
)


def read_host_findings(cpu_count: int, *, variables: Mapping[str, str]) -> tuple[Finding, ...]:
    """Examines memory, processors and environment variables.

    Args:
        cpu_count: Processors that this process may use.
        variables: Environment variables to judge.
    """
    memory = psutil.virtual_memory()
    group = read_control_group()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return (
        memory_finding(memory.total, memory.available, group.memory_limit_bytes),
        cpu_finding(cpu_count, group.cpu_quota, load),
        variables_finding(variables),
    )


def memory_finding(total_bytes: int, available_bytes: int, group_bytes: int | None) -> Finding:
    """Judges the host's memory.

    Args:
        total_bytes: Memory of the host.
        available_bytes: Memory that can be taken without swapping.
        group_bytes: What the control group of this process allows, None without a limit.
    """
    text = f"{gibibytes(total_bytes)}, {gibibytes(available_bytes)} free"
    if group_bytes is not None and group_bytes < total_bytes:
        text = f"{text}; the control group allows {gibibytes(group_bytes)}"
        available_bytes = min(available_bytes, group_bytes)
    if available_bytes < _LEAST_FREE_BYTES:
        text = f"{text}: a second process with TensorFlow needs 1 GiB"
        return Finding("memory", "warning", text)
    return Finding("memory", "ok", text)


def cpu_finding(cpu_count: int, quota: float | None, load: float | None) -> Finding:
    """Judges the processors.

    Args:
        cpu_count: Processors that this process may use.
        quota: Processors' worth of time that the control group allows, None without a limit.
        load: Mean number of running processes over the last minute, None if unknown.
    """
    usable = cpu_count if quota is None else min(cpu_count, quota)
    text = counted(cpu_count, "core")
    if usable < cpu_count:
        text = f"{text}, of whose time the control group allows {usable:g}"
    if load is None:
        return Finding("CPU", "ok", text)
    text = f"{text}, load {load:.1f}"
    if load > _BUSY_SHARE * usable:
        return Finding("CPU", "warning", f"{text}: other work disturbs timings")
    return Finding("CPU", "ok", text)


def variables_finding(variables: Mapping[str, str]) -> Finding:
    """Names the environment variables that change what is measured."""
    changed = [f"{name}={variables[name]}" for name in _VARIABLES if name in variables]
    if not changed:
        return Finding("variables", "ok", "none that change memory or speed")
    return Finding("variables", "ok", f"these change memory or speed: {', '.join(changed)}")
