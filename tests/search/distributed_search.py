"""A search that `kbatch distribute` runs in the tests: directory, tuner, seconds an epoch, mode."""

import sys
import time

import keras
import keras_tuner
import small_models as models

import kbatch

KINDS = {
    "random": lambda hypermodel, **arguments: keras_tuner.RandomSearch(
        hypermodel, "val_accuracy", max_trials=3, **arguments
    ),
    "grid": lambda hypermodel, **arguments: keras_tuner.GridSearch(
        hypermodel, "val_accuracy", **arguments
    ),
    "kbatch": lambda hypermodel, **arguments: kbatch.BatchSizeTuner(
        hypermodel, "val_accuracy", **arguments
    ),
    "isolated": lambda hypermodel, **arguments: kbatch.BatchSizeTuner(
        hypermodel, "val_accuracy", isolate=True, **arguments
    ),
}


class Slow(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        # Under another name: a callback's configuration is part of a search, its pace is none.
        self.pause_s = seconds

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(self.pause_s)


def main(directory, kind, seconds, mode):
    hypermodel = kbatch.BatchSizeHyperModel(
        models.mlp,
        (8, 16, 32),
        micro_batch_size=8,
        learning_rate_scaling="sqrt",
        dtype_policy="float32",
        seed=0,
    )
    overwrite = mode == "overwrite"
    tuner = KINDS[kind](hypermodel, directory=directory, project_name="search", overwrite=overwrite)
    print("searching", flush=True)
    tuner.search(
        *models.rows(94),
        validation_data=models.rows(40, seed=1),
        epochs=3,
        verbose=0,
        callbacks=[Slow(float(seconds))],
    )
    print("best", tuner.get_best_hyperparameters()[0].get("batch_size"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
