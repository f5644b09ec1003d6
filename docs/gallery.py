"""The pictures of the gallery, drawn by the code of its page.

PYTHONPATH=benchmarks:tests python docs/gallery.py measure    some minutes on two cores; writes
                                                              docs/data; needs scikit-learn
python docs/gallery.py                                        draws docs/images/gallery
PYTHONPATH=tests python docs/gallery.py sheet FOLDER          draws every figure in many situations,
                                                              in files of its size and in sheet.png
"""

import dataclasses
import functools
import io
import os
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import kbatch
from kbatch.plotting.canvas import draw_so_wide, figure_of
from kbatch.records.machine import GpuSample

HERE = Path(__file__).parent
DATA, IMAGES = HERE / "data", HERE / "images" / "gallery"
ENTRY = re.compile(
    r"```python\n(?P<code>.*?)```\n\n!\[[^\]]+\]\(images/gallery/(?P<name>[\w-]+)\.png\)", re.DOTALL
)
DPI = 192


def entries():
    """Lists the code and the picture's name of each entry of the page."""
    page = (HERE / "gallery.md").read_text(encoding="utf-8")
    return [(found["name"], found["code"]) for found in ENTRY.finditer(page)]


def draw():
    """Runs the code of each entry, which leaves the Axes in `ax`, and writes its picture."""
    os.chdir(HERE.parent)
    IMAGES.mkdir(exist_ok=True)
    for name, code in entries():
        names = {}
        exec(compile(code, f"gallery.md, {name}", "exec"), names)
        # Few colours: a quarter of the size, and no reader sees the difference.
        picture_of(names["ax"], DPI).quantize(48).save(IMAGES / f"{name}.png", optimize=True)


def sheet(folder):
    """Draws every figure in many situations, 7 inches wide, and 3.4 wide for a dark page."""
    import figure_samples
    from figure_studies import learned_study, make_study, target_study

    twelve = kbatch.powers_of_two(4, 8192)
    of_sizes = {
        name: functools.partial(target_study if name == "time_to_target" else learned_study, 3)
        for name in ("learning_curves", "noise_scale", "pareto", "time_to_target", "trials")
    }
    rows = {
        name: {"usual": make} for name, make in figure_samples.SAMPLES.items() if " " not in name
    }
    for name, make in of_sizes.items():
        one = next(trial for trial in make(sizes=(64,)).trials if trial.status == "completed")
        rows[name] |= {
            "one": lambda one=one: make_study(one),
            "twelve": lambda m=make: m(sizes=twelve),
        }
    for name, _, situation in (name.partition(" of ") for name in figure_samples.SAMPLES):
        if situation:
            rows[name][situation] = figure_samples.SAMPLES[f"{name} of {situation}"]
    for name in figure_samples.OF_SEVERAL:
        rows[name]["two"] = functools.partial(figure_samples.several, name, 2)
    pictures, folder = [], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, situations in rows.items():
        for situation, make in situations.items():
            plot = functools.partial(getattr(kbatch, f"plot_{name}"), make())
            wide, narrow = (picture_of(draw_so_wide(plot, width_in), 110) for width_in in (7, 3.4))
            both = beside([wide, in_the_dark(narrow)])
            both.save(folder / f"{name}-{situation}.png".replace(" ", "-"))
            pictures.append(both.reduce(2))
    lines = [beside(pictures[start : start + 6]) for start in range(0, len(pictures), 6)]
    found = Image.new("RGB", (max(one.width for one in lines), sum(one.height for one in lines)))
    for number, line in enumerate(lines):
        found.paste(line, (0, sum(one.height for one in lines[:number])))
    found.quantize(160).save(folder / "sheet.png", optimize=True)


def picture_of(ax, dpi):
    """Renders a figure."""
    content = io.BytesIO()
    figure_of(ax).savefig(content, format="png", dpi=dpi)
    return Image.open(content).convert("RGB")


def beside(pictures):
    """Joins pictures in a row."""
    size = sum(one.width for one in pictures), max(one.height for one in pictures)
    found = Image.new("RGB", size, "#888")
    for number, picture in enumerate(pictures):
        found.paste(picture, (sum(one.width for one in pictures[:number]), 0))
    return found


def in_the_dark(picture):
    """Gives a picture the colours that it has on a dark page of a report."""
    colors = np.asarray(picture) / 255
    low, high = colors.min(-1, keepdims=True), colors.max(-1, keepdims=True)
    before = (low + high) / 2
    full = np.maximum(1 - np.abs(2 * before - 1), 1e-9)  # The largest spread at this lightness.
    after = 0.94 - 0.85 * before
    after = np.where(high - low > 0.3, np.maximum(after, 0.52), after)
    dark = after + (colors - before) * (1 - np.abs(2 * after - 1)) / full
    return Image.fromarray(np.uint8(255 * dark.clip(0, 1)))


def made_up_gpu():
    """Makes up what a GPU holds and did in a trial: the other records are of a CPU."""
    from figure_studies import max_batch_result
    from records_factory import make_gpu, make_study, make_trial, make_usage

    rng, gpu = random.Random(0), make_gpu()
    samples = []
    for second in range(60):
        # Every 20 s an epoch ends, and the GPU waits for the validation data.
        busy = 0.1 if second % 20 < 3 else rng.uniform(0.86, 0.97)
        memory_bytes = 2e9 if second < 3 else 14e9
        power_w = 90 + 420 * busy + rng.gauss(0, 8)
        samples.append(GpuSample(float(second), busy, memory_bytes, power_w))
    mean = GpuSample(
        30.0,
        statistics.fmean(sample.utilization for sample in samples),
        14e9,
        statistics.fmean(sample.power_w for sample in samples),
    )
    energy_j = 60 * mean.power_w
    gpu = dataclasses.replace(gpu, samples=tuple(samples), mean=mean, energy_j=energy_j)
    usage = dataclasses.replace(make_usage(gpu), duration_s=60.0, readings=60)
    make_study(make_trial(256, usage=usage), name="made up").save(DATA / "made-up-gpu.json")
    max_batch_result().save(DATA / "made-up-memory.json")


def race(x, y):
    """Races batch sizes and learning rates of a small net, and keeps the study in one file."""
    from nets import digits_cnn

    # `validation_split` takes the last rows, which other people wrote.
    order = np.random.default_rng(0).permutation(len(y))
    hypermodel = kbatch.BatchSizeHyperModel(
        digits_cnn, kbatch.powers_of_two(16, 256), dtype_policy="float32", seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        given = {"directory": folder, "project_name": "digits"}
        tuner = kbatch.BatchSizeTuner(hypermodel, "val_accuracy", **given)
        tuner.search(x[order], y[order], validation_split=0.2, epochs=12)
        kbatch.load_study(tuner).save(DATA / "race.json")


def measure():
    """Measures a small net on the digits: how it trains, predicts and reads its data."""
    import tensorflow as tf
    from nets import digits, digits_cnn

    x, y = digits()
    race(x, y)

    def say(text):
        print(text, flush=True)

    sizes = kbatch.powers_of_two(8, 1024)
    training = kbatch.profile_training(digits_cnn, x, y, batch_sizes=sizes, time_budget_s=20)
    training.save(DATA / "training.json")
    say(repr(training))
    inference = kbatch.profile_inference(
        digits_cnn(),
        x,
        batch_sizes=kbatch.powers_of_two(1, 512),
        call_paths=("compiled", "xla"),
        latency_slo_ms=2,
        time_budget_s=40,
    )
    inference.save(DATA / "inference.json")
    say(repr(inference))

    def slowly(image, label):
        for _ in range(20):
            image = tf.image.random_contrast(image, 0.8, 1.2)
        return image, label

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(slowly).batch(64)
    pipeline = kbatch.profile_input_pipeline(digits_cnn(), dataset, time_budget_s=20)
    pipeline.save(DATA / "input.json")
    say(repr(pipeline))
    recommendation = kbatch.recommend(digits_cnn, x, y, time_budget_s=60, seed=0)
    recommendation.save(DATA / "recommendation.json")
    say(str(recommendation))


if __name__ == "__main__":
    if sys.argv[1:2] == ["sheet"]:
        sheet(*sys.argv[2:])
    else:
        if sys.argv[1:] == ["measure"]:
            made_up_gpu()
            measure()
        draw()
