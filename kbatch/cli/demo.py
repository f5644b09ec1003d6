"""The demonstration: a search over batch sizes on scikit-learn's handwritten digits."""

from pathlib import Path
from typing import Any

import keras

from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.search.tuner import BatchSizeTuner
from kbatch.study.loading import RECORD_NAME, load_study
from kbatch.study.study import Study
from kbatch.training.dtype_policy import slow_float16_text

PROJECT_NAME = "demo-search"
MICRO_BATCH_SIZE = 128


def run_demo(
    directory: Path,
    *,
    batch_sizes: tuple[int, ...],
    epochs: int,
    dtype_policy: str,
    seed: int,
) -> Study:
    """Search over batch sizes on the digits."""
    _check_folder(directory / PROJECT_NAME)
    x, y = load_digits()
    hypermodel = BatchSizeHyperModel(
        build_model,
        batch_sizes,
        micro_batch_size=MICRO_BATCH_SIZE,
        dtype_policy=dtype_policy,
        learning_rate_scaling="sqrt",
        seed=seed,
    )
    tuner = BatchSizeTuner(
        hypermodel,
        objective="val_accuracy",
        directory=directory,
        project_name=PROJECT_NAME,
        overwrite=True,
    )
    tuner.search(x, y, validation_split=0.2, epochs=epochs)
    return load_study(tuner)


def default_policy(slowdown: float | None) -> tuple[str, str | None]:
    """Choose the policy where none is given."""
    slow = slow_float16_text(slowdown)
    if slow is None:
        return "mixed_float16", None
    return "float32", (
        f"{slow}: the demo trains in float32. For mixed_float16 all the same, give "
        "`--policy mixed_float16`."
    )


def _check_folder(folder: Path) -> None:
    if folder.exists() and not (folder / RECORD_NAME).exists():
        raise FileExistsError(
            "The demonstration replaces an earlier one only: give another `--output`. Received: "
            f"{folder}, which is no earlier demonstration."
        )


def load_digits() -> tuple[Any, Any]:
    """Load 1,797 images of 8 x 8 pixels in [0, 1], shape (1797, 8, 8, 1), with their digits."""
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The demo's images come with scikit-learn: pip install 'kbatch[demo]'."
        ) from error
    digits: Any = load()
    return digits.images[..., None] / 16.0, digits.target


def build_model() -> keras.Model:
    """Build a small convolutional net whose learning rate suits the smallest batch."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            # Probabilities in float32: float16 rounds them to 0.
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model
