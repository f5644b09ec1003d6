"""Does the pipeline of a search feed arrays faster than `fit`'s own adapter?

python benchmarks/input_feed.py [--rounds 9] [--examples 4000]

Epochs of reading alone (each batch is taken in a graph, and dropped) and of training an MLP and a
CNN on images of MNIST's size, in batches of 16, 64 and 256: from arrays given to `fit`, and from
`kbatch.training_dataset`. The two take turns in shuffled order; printed is the median over the
rounds of the pipeline's time over the adapter's, with its 95 % interval by ranks.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from side_by_side import interleaved, ratio, ratio_interval

import kbatch

SIZES = (16, 64, 256)
BLOCK_S = 0.1
layers = keras.layers


def mlp():
    return [layers.Flatten(), layers.Dense(128, activation="relu")]


def cnn():
    return [
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ]


def model_of(body):
    model = keras.Sequential(
        [layers.Input((28, 28, 1)), *body(), layers.Dense(10, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@tf.function(reduce_retracing=True)
def drop(batches):
    taken = tf.constant(0)
    for x, _ in batches:
        taken += tf.shape(x)[0]
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--examples", type=int, default=4000)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(given.examples, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, given.examples)
    models = {"MLP": model_of(mlp), "CNN": model_of(cnn)}
    print(f"{'epoch of':10} {'size':>5}  pipeline over adapter (95 % interval)")
    for size in SIZES:
        adapter = ArrayDataAdapter(x, y, batch_size=size, shuffle=True)
        known = tf.data.experimental.assert_cardinality(adapter.num_batches)
        fed = {
            "adapter": adapter.get_tf_dataset().apply(known),
            "pipeline": kbatch.training_dataset(x, y, size),
        }
        work = {"reading": drop} | {
            name: lambda data, model=model: model.fit(data, shuffle=False, verbose=0)
            for name, model in models.items()
        }
        for name, do in work.items():
            contenders = {feed: lambda data=data, do=do: do(data) for feed, data in fed.items()}
            for run in contenders.values():
                run()  # Traced before the clock starts.
            seconds = interleaved(contenders, rounds=given.rounds, block_s=BLOCK_S)
            pair = seconds["pipeline"], seconds["adapter"]
            low, high = ratio_interval(*pair)
            print(f"{name:10} {size:5}  {ratio(*pair):.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
