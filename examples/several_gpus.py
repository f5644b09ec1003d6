"""A batch size for all GPUs of this host; without several GPUs, for two halves of the CPU."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import kbatch


def mirrored():
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def build():
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(epochs=10, sizes=(32, 64, 128, 256)):  # examples of all GPUs together
    strategy = mirrored()
    # Several GPUs train in float32: Keras looks for overflows of float16 on the first one only.
    hypermodel = kbatch.BatchSizeHyperModel(build, sizes, dtype_policy="float32")
    how = {"distribution_strategy": strategy, "directory": "gpus", "time_budget_s": 90}
    tuner = kbatch.BatchSizeTuner(hypermodel, "val_accuracy", **how)
    x, y = load_digits(return_X_y=True)
    tuner.search(x / 16, y, validation_split=0.2, epochs=epochs)
    print(tuner.study.decide())


if __name__ == "__main__":
    main()
