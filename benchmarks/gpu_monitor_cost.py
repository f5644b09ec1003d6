"""What does `GpuMonitor` cost a train step?

python benchmarks/gpu_monitor_cost.py [--rounds 15] [--block 1.0]

Time of a step inside a monitor at its default rate over the time without, the median over the
rounds with its 95 % interval, and the same with a reading every millisecond: what a hundred times
the readings cost shows through the noise of a shared machine. Starting the monitor, once a block,
is left out. NVML is the real driver's where there is one; else psutil is measured alone, and the
first line says so.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from accumulation_vs_keras import compiled, updates_of
from nets import nets
from side_by_side import interleaved, ratio, ratio_interval

import kbatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=float, default=1.0, metavar="SECONDS")
    options = parser.parse_args()
    with kbatch.GpuMonitor() as probe:
        readings_ms = [1e3 * _seconds(probe.sample) for _ in range(50)]
    gpus = ", ".join(str(gpu.name) for gpu in probe.gpus or ())
    print(f"read: this process (psutil), {gpus or 'no GPU: ' + str(probe.unavailable)}")
    print(f"one reading: {sorted(readings_ms)[25]:.3f} ms (median of 50)")
    print(f"{'':<24}{'at the default rate':>37}{'every millisecond':>37}")
    columns = f"{'ratio':>9}{'95 % interval':>18}{'a second':>10}"
    print(f"{'net':<15}{'ms/step':>9}{columns}{columns}")
    keras.config.set_dtype_policy("float32")
    for name, net in nets().items():
        step = updates_of(compiled(net), net, len(net.x))
        step(), step()
        watched: dict[str, list[kbatch.GpuMonitor]] = {"default": [], "often": []}
        seconds = interleaved(
            {"alone": step, **dict.fromkeys(watched, step)},
            rounds=options.rounds,
            block_s=options.block,
            during={
                "default": lambda kept=watched["default"]: _kept(kept, kbatch.GpuMonitor()),
                "often": lambda kept=watched["often"]: _kept(
                    kept, kbatch.GpuMonitor(interval_s=1e-3)
                ),
            },
        )
        figures = "".join(_figures(seconds[n], seconds["alone"], watched[n]) for n in watched)
        print(f"{name:<15}{1e3 * statistics.median(seconds['alone']):9.2f}{figures}", flush=True)


def _figures(
    watched_s: list[float], alone_s: list[float], monitors: list[kbatch.GpuMonitor]
) -> str:
    low, high = ratio_interval(watched_s, alone_s)
    usages = [monitor.usage for monitor in monitors]
    rate = sum(usage.readings for usage in usages) / sum(usage.duration_s for usage in usages)
    return f"{ratio(watched_s, alone_s):9.4f}{f'{low:.4f} to {high:.4f}':>18}{rate:10.1f}"


def _kept(monitors: list[kbatch.GpuMonitor], monitor: kbatch.GpuMonitor) -> kbatch.GpuMonitor:
    monitors.append(monitor)
    return monitor


def _seconds(run) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
