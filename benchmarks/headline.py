"""Is the printed gain of a decision the gain that `fit` gives?

python benchmarks/headline.py [--nets cnn mlp text] [--rounds 6] [--epochs 4]    3 minutes

Searches three nets for the size that trains fastest, among six sizes from 16 to 512. Then trains
the base size and the named size as the page says: `fit` on `kbatch.training_dataset`, each model
with the settings of its trial. The two take turns. Aim: within 15 %.

printed    training time of the base size over the named size, as the decision says
fit        the same ratio of the trainings here, with its 95 % interval
off        printed over fit, minus 1
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from quick import parse_arguments
from search_overhead import NETS, SIZES, builder, data
from side_by_side import interleaved, ratio, ratio_interval

import kbatch
from kbatch.training.learning_rate import apply_settings


def search(net: str, epochs: int) -> kbatch.Study:
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            kbatch.BatchSizeHyperModel(builder(net), SIZES),
            "val_accuracy",
            strategy="grid",
            tolerance=0.99,  # Any accuracy will do, so the fastest size is named.
            directory=folder,
        )
        tuner.search(*rows_of(net), validation_split=0.2, epochs=epochs, verbose=0)
        return tuner.study


def rows_of(net: str) -> tuple:
    return data(net, 3000 if net == "text" else 5000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=4)
    options = parse_arguments(parser, nets=["mlp"])
    print(f"{'':6}{'base':>5}{'named':>6}{'printed':>9}{'fit (95 %)':>24}{'off':>7}")
    for net in options.nets:
        study = search(net, options.epochs)
        decision = study.decide()
        base, named = decision.base_batch_size, decision.batch_size
        if named is None or base is None or named == base:
            print(f"{net:6} the base size {base} is the fastest")
            continue
        printed = decision.speedup.value
        trained = int(len(rows_of(net)[0]) * 0.8)
        x, y = (part[:trained] for part in rows_of(net))

        rows = {size: kbatch.training_dataset(x, y, size) for size in (base, named)}

        def train(model: keras.Model, size: int, rows=rows) -> None:
            model.fit(rows[size], epochs=options.epochs, shuffle=False, verbose=0)

        keras.config.set_dtype_policy(decision.trial.dtype_policy)
        trials = {trial.batch_size: trial for trial in study.trials}
        models = {
            size: apply_settings(builder(net)(), trials[size].executions[-1])
            for size in (base, named)
        }
        for size, model in models.items():
            train(model, size)  # It is traced.
        seconds = interleaved(
            {str(size): lambda m=m, size=size: train(m, size) for size, m in models.items()},
            rounds=options.rounds,
            block_s=0.5,
        )
        keras.config.set_dtype_policy("float32")
        both = seconds[str(base)], seconds[str(named)]
        gained = ratio(*both)
        low, high = ratio_interval(*both)
        print(
            f"{net:6}{base:5}{named:6}{printed:9.2f}"
            f"{f'{gained:.2f} ({low:.2f} to {high:.2f})':>24}{printed / gained - 1:+7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
