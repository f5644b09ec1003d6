"""How far is the noise scale under mixed_float16 from that in float32, on the same batches?

python benchmarks/noise_scale_precision.py [--updates 40]

Each net keeps its weights, so that both policies see the same gradients: tr(Sigma), |G|^2 and the
noise scale under mixed_float16 over those in float32, minus 1, in percent, once from micro-batches
and once from halves of a batch that is not accumulated.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from nets import nets

from kbatch.training.accumulation import accumulate_gradients, measure_moments

NAMES = ("gradient_variance", "gradient_squared_norm")


def moments(net, policy, weights, *, halves, updates):
    keras.config.set_dtype_policy(policy)
    model = net.build()
    keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    if weights is not None:
        model.set_weights(weights)
    kept = model.get_weights()
    batch = 2 * net.micro_batch_size
    micro_batch_size = batch if halves else batch // 4
    if micro_batch_size < batch:
        accumulate_gradients(model, micro_batch_size, moments_every=1)
    else:
        measure_moments(model, every=1)
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
    print(f"{'net':<15}{'cut in':<12}" + "".join(f"{title:>13}" for title in titles))
    for name, net in nets().items():
        for halves in (False, True):
            keras.utils.set_random_seed(0)
            arguments = {"halves": halves, "updates": options.updates}
            full, weights = moments(net, "float32", None, **arguments)
            half, _ = moments(net, "mixed_float16", weights, **arguments)
            ratios = [half[0] / full[0], half[1] / full[1]]
            ratios.append(ratios[0] / ratios[1])
            cut = "halves" if halves else "quarters"
            print(f"{name:<15}{cut:<12}" + "".join(f"{100 * (r - 1):12.3f}%" for r in ratios))


if __name__ == "__main__":
    main()
