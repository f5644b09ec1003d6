"""How far is the noise scale under mixed_float16 from that in float32, on the same batches?

python benchmarks/noise_scale_precision.py [--updates 40]

Each net keeps its weights, so that both policies see the same gradients: tr(Sigma), |G|^2 and the
noise scale under mixed_float16 over those in float32, minus 1, in percent.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from nets import nets

from kbatch.training.accumulation import accumulate_gradients

NAMES = ("gradient_variance", "gradient_squared_norm")


def moments(net, policy, weights, *, updates):
    keras.config.set_dtype_policy(policy)
    model = net.build()
    keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    if weights is not None:
        model.set_weights(weights)
    kept = model.get_weights()
    batch = 2 * net.micro_batch_size
    accumulate_gradients(model, batch // 4, moments_every=1)
    epochs = -(-updates * batch // len(net.x))
    history = model.fit(
        net.x, net.y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0
    ).history
    return [history[name][-1] for name in NAMES], kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    titles = ("tr(Sigma)", "|G|^2", "noise scale")
    print(f"{'net':<15}" + "".join(f"{title:>13}" for title in titles))
    for name, net in nets().items():
        keras.utils.set_random_seed(0)
        full, weights = moments(net, "float32", None, updates=options.updates)
        half, _ = moments(net, "mixed_float16", weights, updates=options.updates)
        ratios = [half[0] / full[0], half[1] / full[1]]
        ratios.append(ratios[0] / ratios[1])
        print(f"{name:<15}" + "".join(f"{100 * (r - 1):12.3f}%" for r in ratios))


if __name__ == "__main__":
    main()
