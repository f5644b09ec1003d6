"""What do the moments behind the noise scale cost?

python benchmarks/gradient_moments_cost.py [--rounds 9] [--block 0.5]

Time of an accumulated update with the moments of every update, with those of every eighth (the
default), over the time without. The last line is the geometric mean.
"""

import argparse
import itertools
import os
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from accumulation_vs_keras import compiled, updates_of
from nets import nets
from side_by_side import interleaved, ratio

import kbatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=float, default=0.5, metavar="SECONDS")
    options = parser.parse_args()
    print(f"{'net':<15}{'policy':<15}{'every':>9}{'8th':>9}")
    rows = []
    for (name, net), policy in itertools.product(nets().items(), ("float32", "mixed_float16")):
        keras.config.set_dtype_policy(policy)
        runs = {}
        for every in (0, 1, 8):
            model = compiled(net)
            kbatch.accumulate_gradients(model, net.micro_batch_size, moments_every=every)
            runs[str(every)] = updates_of(model, net, len(net.x))
        for run in runs.values():
            run(), run()
        seconds = interleaved(runs, rounds=options.rounds, block_s=options.block)
        rows.append([ratio(seconds[every], seconds["0"]) for every in ("1", "8")])
        print(f"{name:<15}{policy:<15}" + "".join(f"{r:9.3f}" for r in rows[-1]), flush=True)
        keras.config.set_dtype_policy("float32")
    means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':<30}" + "".join(f"{mean:9.3f}" for mean in means))


if __name__ == "__main__":
    main()
