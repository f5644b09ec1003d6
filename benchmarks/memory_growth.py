"""How much does memory grow with each trial of a search, and with each model of a plain loop?

python benchmarks/memory_growth.py [--trials 30] [--examples 1000] [--epochs 1]    2 minutes

The search tunes the demo's convolutional net over two batch sizes and several learning rates. The
loop builds, trains and drops as many models. Each runs in a process of its own. The growth is the
slope of a line through the resident memory after each trial, without the first five trials, which
trace graphs and fill caches. Aim: 3 MB per trial, or no more than the loop.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from quick import parse_arguments

SIZES = (64, 128)
WARM = 5


def search(x, y, rates, epochs):
    import psutil

    import kbatch
    from kbatch.cli.demo import build_image_model

    seen = []

    class Watched(kbatch.BatchSizeTuner):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            seen.append(psutil.Process().memory_info().rss)

    def build(hp):
        model = build_image_model()
        model.optimizer.learning_rate = hp.Choice("rate", rates)
        return model

    with tempfile.TemporaryDirectory() as folder:
        hypermodel = kbatch.BatchSizeHyperModel(
            build, SIZES, base_batch_size=SIZES[0], dtype_policy="float32"
        )
        tuner = Watched(hypermodel, "val_accuracy", strategy="grid", directory=folder)
        tuner.search(x, y, validation_split=0.2, epochs=epochs, verbose=0)
    return seen


def loop(x, y, rates, epochs):
    import keras
    import psutil

    from kbatch.cli.demo import build_image_model

    seen = []
    for rate in rates:
        for batch_size in SIZES:
            keras.backend.clear_session()
            gc.collect()
            model = build_image_model()
            model.optimizer.learning_rate = rate
            model.fit(x, y, batch_size=batch_size, validation_split=0.2, epochs=epochs, verbose=0)
            seen.append(psutil.Process().memory_info().rss)
    return seen


def run(contender, trials, examples, epochs):
    """Train in this process; return its resident bytes after each trial."""
    from kbatch.cli.demo import load_images

    x, y = load_images()
    rates = np.geomspace(1e-4, 1e-2, trials // len(SIZES)).tolist()
    return {"search": search, "loop": loop}[contender](x[:examples], y[:examples], rates, epochs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parse_arguments(parser, trials=8)
    if given.one:
        print(json.dumps(run(*json.loads(given.one))))
        return
    print(f"{'':7}{'MB per trial':>14}  resident MB")
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    for contender in ("search", "loop"):
        task = json.dumps([contender, given.trials, given.examples, given.epochs])
        command = [sys.executable, __file__, "--one", task]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seen = np.array(json.loads(found.stdout.splitlines()[-1])) / 1e6
        slope, _ = np.polyfit(np.arange(len(seen) - WARM), seen[WARM:], 1)
        shown = ", ".join(f"{mb:.0f}" for mb in seen[:: max(1, len(seen) // 6)])
        print(f"{contender:7}{slope:14.2f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
