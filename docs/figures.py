"""The figures of the guide on noise scale and goodput, from runs of kbatch.

PYTHONPATH=benchmarks python docs/figures.py measure    trains, some minutes on two cores; writes
                                                        docs/data; needs scikit-learn
python docs/figures.py                                  draws docs/images from docs/data
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import kbatch
from kbatch.plotting.saving import save_figure

HERE = Path(__file__).parent
DATA, IMAGES = HERE / "data", HERE / "images"
BATCH_SIZES = kbatch.powers_of_two(8, 1024)
PILOT_SIZE, PILOT_MICRO = 64, 8


def measure():
    """Trains until the target at every size, and measures the noise scale at one of them."""
    ends = [kbatch.StopAtTarget("val_accuracy", 0.97), kbatch.TimeBudget(20)]
    # Only the largest batch is cut: by its two parts the study has a noise scale.
    half = BATCH_SIZES[-1] // 2
    search("to-the-target", ("seconds_to_target", "min"), BATCH_SIZES, half, 1000, ends)
    search("pilot", ("val_accuracy", "max"), (PILOT_SIZE,), PILOT_MICRO, 12, [])


def search(name, objective, batch_sizes, micro_batch_size, epochs, callbacks):
    """Runs a search on the digits and keeps its study in one file."""
    import keras_tuner
    from nets import digits, digits_cnn

    x, y = digits()
    # `validation_split` takes the last rows, which other people wrote.
    order = np.random.default_rng(0).permutation(len(y))
    hypermodel = kbatch.BatchSizeHyperModel(
        digits_cnn,
        batch_sizes,
        micro_batch_size=micro_batch_size,
        dtype_policy="float32",
        base_batch_size=PILOT_SIZE,
        seed=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            keras_tuner.Objective(*objective),
            executions_per_trial=3,
            directory=folder,
            project_name=name,
        )
        fit = {"validation_split": 0.2, "epochs": epochs, "callbacks": callbacks}
        tuner.search(x[order], y[order], **fit)
        kbatch.load_study(tuner).save(DATA / f"{name}.json")


def draw():
    """Draws the figures from the two studies."""
    to_the_target, pilot = (
        kbatch.load_study(DATA / f"{n}.json") for n in ("to-the-target", "pilot")
    )
    figures = {
        "learning-curves": kbatch.plot_learning_curves(to_the_target),
        "to-the-target": kbatch.plot_time_to_target(to_the_target),
        "noise-scale": kbatch.plot_noise_scale(pilot),
        "goodput": kbatch.plot_noise_scale(to_the_target),
    }
    for name, figure in figures.items():
        save_figure(figure, IMAGES / f"{name}.png")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    draw()
