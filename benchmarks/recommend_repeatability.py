"""Does kbatch recommend the same batch size again, beside a noisy neighbour?

python benchmarks/recommend_repeatability.py [--repeats 10] [--net mlp] [--budget 30] [--quiet]

A neighbour process multiplies matrices in bursts of random length. Each repeat recommends anew for
a net on scikit-learn's digits, with other weights and another order. A repeat agrees where its size
lies within one step of the grid of the median size.
"""

import argparse
import math
import statistics
import time

import keras
from inference_repeatability import neighbour

import kbatch
from kbatch.demo import build_model, load_digits

layers = keras.layers


def mlp():
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


NETS = {"mlp": mlp, "cnn": build_model}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--net", choices=sorted(NETS), default="mlp")
    parser.add_argument("--budget", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--quiet", action="store_true", help="without the neighbour")
    options = parser.parse_args()
    x, y = load_digits()
    sizes: list[int | None] = []
    seconds: list[float] = []
    print(f"{'batch':>6}{'micro':>7}{'noise scale':>22}{'seconds':>9}  limit")
    with neighbour(options.quiet):
        for seed in range(options.repeats):
            began_s = time.perf_counter()
            found = kbatch.recommend(NETS[options.net], x, y, budget_s=options.budget, seed=seed)
            seconds.append(time.perf_counter() - began_s)
            sizes.append(found.batch_size)
            row = f"{found.batch_size or '-':>6}{found.micro_batch_size or '-':>7}"
            limits = " or ".join(found.binding)
            print(f"{row}{noise_text(found):>22}{seconds[-1]:>9.1f}  {limits}", flush=True)
    known = [math.log2(size) for size in sizes if size is not None]
    middle = statistics.median_low(known) if known else math.nan
    agreeing = sum(abs(size - middle) <= 1 for size in known)
    print(
        f"{options.net}: {agreeing} of {options.repeats} within one step of {2**middle:.0f}; "
        f"{statistics.median(seconds):.0f} s each (median), {max(seconds):.0f} s at most"
    )


def noise_text(found: kbatch.Recommendation) -> str:
    noise = found.noise_scale
    if noise.value is None or noise.interval is None:
        return f"at least {noise.at_least or 0:.0f}"
    return f"{noise.value:.0f} ({noise.interval.low:.0f} to {noise.interval.high:.0f})"


if __name__ == "__main__":
    main()
