"""Which batch size, and which learning rate, suit a text classifier that masks its padding?

python examples/film_reviews.py  [DIRECTORY]     Keras downloads 50,000 film reviews (17 MB)
"""

import sys

import keras

import kbatch

layers = keras.layers
VOCABULARY, LENGTH = 20_000, 200
SIZES = kbatch.powers_of_two(32, 512)


def build(hp):
    tokens = keras.Input((LENGTH,), dtype="int32")
    # Token 0 is padding: attention and the mean skip it.
    words = layers.Embedding(VOCABULARY, 64, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=32)(words, words)
    words = layers.LayerNormalization()(layers.add([words, attended]))
    mean = layers.GlobalAveragePooling1D()(words)
    outputs = layers.Dense(1, activation="sigmoid", dtype="float32")(layers.Dropout(0.3)(mean))
    model = keras.Model(tokens, outputs)
    learning_rate = hp.Choice("learning_rate", [3e-4, 1e-3])
    model.compile(keras.optimizers.Adam(learning_rate), "binary_crossentropy", metrics=["accuracy"])
    return model


def load():
    (texts, y), _ = keras.datasets.imdb.load_data(num_words=VOCABULARY)
    return keras.utils.pad_sequences(texts, maxlen=LENGTH, padding="post"), y


def search(x, y, directory, *, batch_sizes=SIZES, epochs=3):
    hypermodel = kbatch.BatchSizeHyperModel(build, batch_sizes, micro_batch_size=64, seed=0)
    tuner = kbatch.BatchSizeTuner(
        hypermodel, "val_accuracy", strategy="grid", directory=directory, project_name="reviews"
    )
    tuner.search(x, y, validation_split=0.2, epochs=epochs)
    return tuner.study


def show(study, directory):
    columns = ["batch_size", "hp/learning_rate", "samples_per_second", "val_accuracy"]
    print(study.to_dataframe()[columns])
    kbatch.plot_trials(study).figure.savefig(f"{directory}/trials.png", bbox_inches="tight")
    kbatch.write_report(study, f"{directory}/report.html")
    print(f"{directory}/trials.png", f"{directory}/report.html", sep="\n")


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "reviews-results"
    show(search(*load(), directory), directory)
