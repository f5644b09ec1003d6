"""The pictures of the gallery, drawn by the code of its page.

PYTHONPATH=benchmarks:tests python docs/gallery.py measure    some minutes on two cores; writes
                                                              docs/data; needs scikit-learn
python docs/gallery.py                                        draws docs/images/gallery
"""

import dataclasses
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
from kbatch.plotting.canvas import figure_of
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
        content = io.BytesIO()
        # Few colours: a quarter of the size, and no reader sees the difference.
        figure_of(names["ax"]).savefig(content, format="png", dpi=DPI)
        picture = Image.open(content).convert("RGB").quantize(64)
        picture.save(IMAGES / f"{name}.png", optimize=True)


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
    if sys.argv[1:] == ["measure"]:
        made_up_gpu()
        measure()
    draw()
