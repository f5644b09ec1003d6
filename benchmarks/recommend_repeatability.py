"""Does kbatch name the same batch size to start with again, beside a noisy neighbour?

python benchmarks/recommend_repeatability.py [--net mlp] [--repeats 10] [--budget 30] [--quiet]
    [--keep FILE] [--seconds 280]

A neighbour process multiplies matrices in bursts of random length. Each repeat recommends again for
a net on scikit-learn's digits, with other weights and another order. A repeat agrees where its size
lies within one step of the grid of the median size. With --keep each repeat is added to a file, and
none is begun after --seconds: the same command again makes those that are missing.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import keras
from inference_repeatability import neighbour
from nets import digits, digits_cnn

import kbatch

layers = keras.layers


def mlp(optimizer="adam"):
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def mlp_sgd():
    return mlp(keras.optimizers.SGD(0.05))


NETS = {"mlp": mlp, "mlp-sgd": mlp_sgd, "cnn": digits_cnn}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--net", choices=sorted(NETS), default="mlp")
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--quiet", action="store_true", help="without the neighbour")
    parser.add_argument("--keep", type=Path, help="file of the repeats so far")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    x, y = digits()
    known = options.keep is not None and options.keep.exists()
    rows = json.loads(options.keep.read_text()) if known else []
    end_s = time.perf_counter() + options.seconds
    with neighbour(options.quiet):
        for seed in range(len(rows), options.repeats):
            began_s = time.perf_counter()
            if began_s > end_s:
                break
            found = kbatch.recommend(
                NETS[options.net], x, y, time_budget_s=options.budget, seed=seed
            )
            rows.append(row_of(found, time.perf_counter() - began_s))
            if options.keep is not None:
                options.keep.write_text(json.dumps(rows))
    tell(options.net, rows)


def row_of(found: kbatch.Recommendation, seconds: float) -> dict:
    return {
        "batch": found.batch_size,
        "micro": found.micro_batch_size,
        "noise": noise_text(found),
        "search": " to ".join(map(str, sorted({*found.batch_sizes[:1], *found.batch_sizes[-1:]}))),
        "seconds": round(seconds, 1),
        "limit": " or ".join(found.binding),
    }


def tell(net: str, rows: list[dict]) -> None:
    """Prints the repeats, and how many agree."""
    widths = {"batch": 6, "micro": 7, "noise": 22, "search": 14, "seconds": 9}
    print("".join(f"{name:>{width}}" for name, width in widths.items()) + "  limit")
    for row in rows:
        cells = "".join(f"{row[name] or '-':>{width}}" for name, width in widths.items())
        print(f"{cells}  {row['limit']}")
    known = [math.log2(row["batch"]) for row in rows if row["batch"]]
    middle = statistics.median_low(known) if known else math.nan
    agreeing = sum(abs(size - middle) <= 1 for size in known)
    seconds = [row["seconds"] for row in rows]
    print(
        f"{net}: {agreeing} of {len(rows)} within one step of {2**middle:.0f}; "
        f"{statistics.median(seconds):.0f} s each (median), {max(seconds):.0f} s at most"
    )


def noise_text(found: kbatch.Recommendation) -> str:
    noise = found.noise_scale
    if noise.value is None or noise.ends is None:
        return f"at least {noise.low or 0:.0f}"
    return f"{noise.value:.0f} ({noise.low:.0f} to {noise.high:.0f})"


if __name__ == "__main__":
    main()
