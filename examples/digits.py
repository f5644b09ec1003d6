"""Which batch size suits a small convolutional net on handwritten digits?

python examples/digits.py [DIRECTORY]      half a minute on a processor
"""

import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import kbatch

layers = keras.layers
SIZES = kbatch.powers_of_two(16, 1024)


def build():
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def load():
    digits = load_digits()
    return digits.images[..., None] / 16.0, digits.target


def search(x, y, directory, *, batch_sizes=SIZES, epochs=20):
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    hypermodel = kbatch.BatchSizeHyperModel(
        build,
        batch_sizes,
        micro_batch_size=128,
        dtype_policy="mixed_float16" if on_gpu else "float32",
        learning_rate_scaling="sqrt",
        seed=0,
    )
    tuner = kbatch.BatchSizeTuner(
        hypermodel, "val_accuracy", directory=directory, project_name="digits"
    )
    tuner.search(x, y, validation_split=0.2, epochs=epochs)
    return kbatch.load_study(tuner)


def tell(study, directory):
    print(study.to_dataframe()[["batch_size", "samples_per_second", "val_accuracy"]])
    kbatch.plot_trials(study).figure.savefig(f"{directory}/trials.png", bbox_inches="tight")
    kbatch.write_report(study, f"{directory}/report.html")
    print(f"{directory}/trials.png", f"{directory}/report.html", sep="\n")


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "digits-results"
    tell(search(*load(), directory), directory)
