"""The figures of the guides, from runs of kbatch.

PYTHONPATH=benchmarks python docs/figures.py measure    trains, some minutes on two cores; writes
                                                        docs/data; needs scikit-learn
PYTHONPATH=benchmarks python docs/figures.py            draws docs/images from docs/data and from
                                                        benchmarks/tables
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import kbatch
from kbatch.plotting.canvas import SMALL_PT, TEXT_PT, WIDTH_IN, save_figure, size_color, tidy
from kbatch.study.figures.trials import draw_live

HERE = Path(__file__).parent
DATA, IMAGES = HERE / "data", HERE / "images"
BATCH_SIZES = kbatch.powers_of_two(8, 1024)
BASE_SIZE = 64


def measure():
    """Trains digits until the target at every size, and keeps the study in one file."""
    import keras_tuner
    from nets import digits, digits_cnn

    x, y = digits()
    # `validation_split` takes the last rows, which other people wrote.
    order = np.random.default_rng(0).permutation(len(y))
    hypermodel = kbatch.BatchSizeHyperModel(
        digits_cnn,
        BATCH_SIZES,
        # Only the largest batch is cut: by its two parts the study has a noise scale.
        micro_batch_size=BATCH_SIZES[-1] // 2,
        dtype_policy="float32",
        base_batch_size=BASE_SIZE,
        seed=0,
    )
    ends = [kbatch.StopAtTarget("val_accuracy", 0.97), kbatch.TimeBudget(20)]
    with tempfile.TemporaryDirectory() as folder:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            keras_tuner.Objective("seconds_to_target", "min"),
            strategy="grid",
            executions_per_trial=3,
            directory=folder,
            project_name="to-the-target",
        )
        fit = {"validation_split": 0.2, "epochs": 1000, "callbacks": ends}
        tuner.search(x[order], y[order], **fit)
        kbatch.load_study(tuner).save(DATA / "to-the-target.json")


def learning_rates():
    """Draws how accurate three nets become, by learning rate and batch size."""
    from tables import FACTORS, SIZES, read_table

    figure = Figure(figsize=(WIDTH_IN, 2.7), layout="constrained")
    nets = {"mlp": "MLP, SGD", "cnn": "CNN, Adam", "text": "text, Adam"}
    for net, title, panel in zip(nets, nets.values(), figure.subplots(1, 3), strict=True):
        for size, accuracy in zip(SIZES, read_table(net).truth, strict=True):
            color = size_color(size, SIZES)
            panel.plot(FACTORS, accuracy, color=color, label=str(size), linewidth=1.2)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1 / 64, 1 / 8, 1, 8, 64], ["1/64", "1/8", "1", "8", "64"])
        panel.minorticks_off()
        panel.set_title(title, fontsize=TEXT_PT)
        panel.tick_params(labelsize=SMALL_PT)
        tidy(panel)
    first, middle, last = figure.axes
    first.set_ylabel("test accuracy", fontsize=TEXT_PT)
    middle.set_xlabel("learning rate, times the rule's for the batch size", fontsize=TEXT_PT)
    last.legend(title="batch size", fontsize=SMALL_PT, title_fontsize=SMALL_PT, frameon=False)
    return figure


def running(study):
    """Draws a search as `LivePlot` shows it, with the fifth trial running."""
    begun = dataclasses.replace(study, name="digits", trials=study.trials[:5])
    last = begun.trials[-1]
    status = f"4 trials ended, batch size {last.batch_size} is running"
    return draw_live(begun, running=last.trial_id, status=status)


def draw():
    """Draws the figures."""
    study = kbatch.load_study(DATA / "to-the-target.json")
    figures = {
        "learning-curves": kbatch.plot_learning_curves(study),
        "to-the-target": kbatch.plot_time_to_target(study),
        "goodput": kbatch.plot_noise_scale(study),
        "learning-rates": learning_rates(),
        "live": running(study),
    }
    for name, figure in figures.items():
        save_figure(figure, IMAGES / f"{name}.png")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    draw()
