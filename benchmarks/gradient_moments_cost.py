"""What do the moments behind the noise scale cost?

python benchmarks/gradient_moments_cost.py [--rounds 9] [--block 0.5]
    [--net NAME ...] [--policy NAME ...]

Time of an accumulated update with the moments of every update, with those of every eighth (the
default), over the time without. The last column is what the first step, tracing included, takes
beside that of one without. The last line is the geometric mean.
"""

import argparse
import itertools
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from accumulation_vs_keras import compiled, updates_of
from nets import Net, nets
from side_by_side import interleaved, ratio

import kbatch

EVERY = (1, 8)


def accumulating(net: Net, every: int) -> keras.Model:
    return kbatch.accumulate_gradients(compiled(net), net.micro_batch_size, moments_every=every)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=float, default=0.5, metavar="SECONDS")
    known = nets()
    parser.add_argument("--net", nargs="+", choices=known, metavar="NAME", help="only these")
    parser.add_argument("--policy", nargs="+", default=["float32", "mixed_float16"], metavar="NAME")
    options = parser.parse_args()
    titles = [*(f"every {n}" for n in EVERY), "first step"]
    print(f"{'net':<15}{'policy':<15}" + "".join(f"{title:>12}" for title in titles))
    rows = []
    for name, policy in itertools.product(options.net or known, options.policy):
        net = known[name]
        keras.config.set_dtype_policy(policy)
        runs, first_s = {}, {}
        for every in (0, *EVERY):
            runs[every] = updates_of(accumulating(net, every), net, len(net.x))
            began_s = time.perf_counter()
            runs[every]()
            first_s[every] = time.perf_counter() - began_s
            runs[every]()
        seconds = interleaved(
            {str(every): run for every, run in runs.items()},
            rounds=options.rounds,
            block_s=options.block,
        )
        rows.append([ratio(seconds[str(every)], seconds["0"]) for every in EVERY])
        rows[-1].append(first_s[EVERY[-1]] / first_s[0])
        print(f"{name:<15}{policy:<15}" + "".join(f"{r:12.3f}" for r in rows[-1]), flush=True)
        keras.config.set_dtype_policy("float32")
    means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':<30}" + "".join(f"{mean:12.3f}" for mean in means))


if __name__ == "__main__":
    main()
