"""A batch size for a table with 3 % of positives, by the average precision of the rare class."""

import keras
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split

import kbatch


def build():
    layers = [keras.Input((20,)), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2)]
    outputs = keras.layers.Dense(1, activation="sigmoid", dtype="float32")
    model = keras.Sequential([*layers, outputs])
    metrics = [keras.metrics.AUC(curve="PR", name="precision_recall")]
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=metrics)
    return model


def main(epochs=8, rows=20_000):
    x, y = make_classification(rows, 20, n_informative=8, weights=[0.97], random_state=0)
    # Each part gets its share of the positives.
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.25, stratify=y, random_state=0)
    tuner = kbatch.BatchSizeTuner(
        build,
        "val_precision_recall",
        batch_sizes=kbatch.powers_of_two(32, 1024),
        tolerance=0.03,  # with few positives, small differences are within the noise
        directory="imbalanced",
    )
    tuner.search(x, y, validation_data=(x_val, y_val), class_weight={0: 1, 1: 10}, epochs=epochs)
    print(tuner.study.decide())


if __name__ == "__main__":
    main()
