"""How fast is micro_batch_size="auto" against the stock full-batch step?

python benchmarks/auto_micro_batch.py [--rounds 25] [--block 0.3] [--policy float32]
    [--nets mlp,resnet] [--times 8]

Each row is one net with one batch size: its own and eight times that, or the times given. "auto" is
asked as in a trial: memory by probes in a worker process, then train steps on the whole batch
against micro-batches. The ratio is samples/s of the step that it chose over samples/s of Keras's
own step on the whole batch, the median over the rounds with its 95 % interval; where it chose the
whole batch the two are alike, and the ratio shows the noise. The search is what "auto" took, in
seconds.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from accumulation_vs_keras import compiled, updates_of
from nets import Net, nets
from side_by_side import interleaved, ratio, ratio_interval

import kbatch
from kbatch.search.auto_micro_batch import MOMENTS_EVERY, MicroBatchCache, SearchMicroBatches
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import sample_of

TIMES = (1, 8)


def enlarged(net: Net, times: int) -> Net:
    rows = np.arange(len(net.x) * times) % len(net.x)
    return net._replace(x=net.x[rows], y=net.y[rows])


def found(net: Net):
    """What "auto" chooses for a batch of all rows, and the seconds that it took."""
    search = SearchMicroBatches(largest_batch_size=len(net.x), memory_limit_bytes=None)
    source = sample_of(FitData(net.x, net.y))
    started_s = time.perf_counter()
    cache = MicroBatchCache(search, compiled(net), lambda: compiled(net), source, None)
    return cache.fastest(len(net.x)).size, time.perf_counter() - started_s


def chosen(net: Net, size: int) -> keras.Model:
    model = compiled(net)
    if size < len(net.x):
        kbatch.accumulate_gradients(model, size, moments_every=MOMENTS_EVERY)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--block", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--nets", default=",".join(nets()))
    parser.add_argument("--times", type=int, nargs="*", default=TIMES)
    options = parser.parse_args()
    keras.config.set_dtype_policy(options.policy)
    print(f"policy {options.policy}, {options.rounds} rounds")
    print(f"{'net':<15}{'batch':>7}{'auto':>7}{'search (s)':>12}{'ratio':>8}{'95 % interval':>17}")
    ratios: dict[int, list[float]] = {times: [] for times in options.times}
    for name in options.nets.split(","):
        for times in options.times:
            net = enlarged(nets()[name], times)
            size, search_s = found(net)
            runs = {
                "stock": updates_of(compiled(net), net, len(net.x)),
                "auto": updates_of(chosen(net, size), net, len(net.x)),
            }
            for run in runs.values():
                run(), run()
            seconds = interleaved(runs, rounds=options.rounds, block_s=options.block)
            value = ratio(seconds["stock"], seconds["auto"])
            low, high = ratio_interval(seconds["stock"], seconds["auto"])
            ratios[times].append(value)
            between = f"{low:.2f} to {high:.2f}"
            row = f"{name:<15}{len(net.x):>7}{size:>7}{search_s:>12.1f}{value:>8.2f}{between:>17}"
            print(row, flush=True)
            keras.utils.clear_session()
    for times, values in ratios.items():
        label = "the nets' own batches" if times == 1 else f"{times} times as large"
        mean = statistics.geometric_mean(values)
        print(f"{label}: geometric mean {mean:.2f}, lowest {min(values):.2f}")


if __name__ == "__main__":
    main()
