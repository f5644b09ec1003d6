"""Which batch size brings a small ResNet to 70 % on CIFAR-10 in the least time?

python examples/cifar10.py [DIRECTORY]     a GPU is of use; Keras downloads the images (170 MB)
"""

import sys

import keras
import keras_tuner

import kbatch

layers = keras.layers
SIZES = kbatch.powers_of_two(64, 1024)


def build():
    inputs = keras.Input((32, 32, 3))
    images = layers.Conv2D(32, 3, padding="same")(inputs)
    for filters in (32, 64, 128):
        images = residual(images, filters)
    images = layers.Activation("relu")(layers.GroupNormalization(8)(images))
    pooled = layers.GlobalAveragePooling2D()(images)
    # Probabilities in float32: float16 rounds small ones to 0.
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(pooled)
    model = keras.Model(inputs, outputs)
    # A learning rate that suits the smallest batch, of 64; larger ones follow by the rule.
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def residual(images, filters):
    # GroupNormalization looks at one image at a time, so accumulated batches equal whole ones.
    x = layers.Activation("relu")(layers.GroupNormalization(8)(images))
    x = layers.Conv2D(filters, 3, strides=2, padding="same")(x)
    x = layers.Activation("relu")(layers.GroupNormalization(8)(x))
    x = layers.Conv2D(filters, 3, padding="same")(x)
    return layers.add([x, layers.Conv2D(filters, 1, strides=2)(images)])


def load():
    (x, y), _ = keras.datasets.cifar10.load_data()
    return x.astype("float32") / 255, y[:, 0]


def search(x, y, directory, *, batch_sizes=SIZES, seconds=300):
    hypermodel = kbatch.BatchSizeHyperModel(build, batch_sizes, seed=0)
    fastest = keras_tuner.Objective("seconds_to_target", "min")
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        fastest,
        strategy="grid",
        directory=directory,
        project_name="cifar10",
        executor="local",
        max_parallel=1,
    )
    enough = [kbatch.StopAtTarget("val_accuracy", 0.7), kbatch.TimeBudget(seconds)]
    tuner.search(x, y, validation_split=0.1, epochs=1000, callbacks=enough)
    return tuner.study


def show(study, directory):
    columns = ["batch_size", "micro_batch_size", "samples_per_second", "seconds_to_target"]
    print(study.to_dataframe()[columns])
    kbatch.plot_trials(study).figure.savefig(f"{directory}/trials.png", bbox_inches="tight")
    kbatch.write_report(study, f"{directory}/report.html")
    print(f"{directory}/trials.png", f"{directory}/report.html", sep="\n")


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "cifar10-results"
    show(search(*load(), directory), directory)
