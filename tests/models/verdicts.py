"""What kbatch does with a model kind: the rows of the table in docs/models.md.

`make models-table` writes them again; `python -m models.verdicts KIND ...` those of some kinds.
"""

import re
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import keras
import keras_tuner
import numpy as np
import tensorflow as tf
from models.kinds import KINDS, Kind
from tensorflow.python.framework.tensor_util import constant_value_as_shape

import kbatch
from kbatch.training.accumulation.parts_check import parts_note, still_draws

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Of the movement of a variable in one update, in float32.
TOLERANCE = 1e-4
ROWS, PART = 12, 5


def searched(kind: Kind, directory, sizes: tuple[int, ...] = (8, 16)) -> str:
    """Search sizes under the defaults, with a learning rate that suits 8."""
    hypermodel = kbatch.BatchSizeHyperModel(kind.build, sizes, base_batch_size=8, seed=0)
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        keras_tuner.Objective(kind.objective, "min"),
        strategy="grid",
        directory=directory,
        project_name="search",
    )
    held_out = kind.data(16, seed=1)
    validated = kind.objective.startswith("val_")
    validation = held_out[0] if len(held_out) == 1 else held_out
    # As on a GPU, where only a model that cannot train under mixed_float16 does not.
    with warnings.catch_warnings(), mock.patch("kbatch.search.plan.gpu_visible", lambda: True):
        warnings.simplefilter("ignore")
        tuner.search(
            *kind.data(96), validation_data=validation if validated else None, epochs=1, verbose=0
        )
    trials = kbatch.load_study(tuner).trials
    failed = [trial for trial in trials if trial.status != "completed"]
    if failed or len(trials) < len(sizes):
        return f"failed: {failed[0].failure if failed else 'too few trials'}"
    policies = {trial.dtype_policy for trial in trials}
    return "yes" if policies == {"mixed_float16"} else f"yes, in {', '.join(policies)}"


def in_parts(kind: Kind, **options) -> tuple[str, float]:
    """Compare one update in parts with the whole; how far a variable is off, of its movement."""
    expected = moved(kind)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = moved(kind, micro_batch_size=PART, **options)
    except (ValueError, TypeError):
        return "refused", np.inf
    norms = [np.linalg.norm(one) for one in expected]
    least = 0.01 * np.linalg.norm(norms)
    difference = max(
        np.linalg.norm(parts - whole) / max(norm, least)
        for parts, whole, norm in zip(found, expected, norms, strict=True)
    )
    if difference <= TOLERANCE:
        return "exact", difference
    if options.get("exact"):
        return "differs", difference
    seen = any(re.search("micro-batch|whole batch", str(one.message)) for one in said)
    if not seen:
        keras.utils.set_random_seed(0)
        seen = parts_note(kind.build(), a_batch(kind.data(2 * ROWS))) is not None
    return "differs, with a warning" if seen else "differs silently", difference


def moved(kind: Kind, micro_batch_size=None, **options) -> list[np.ndarray]:
    """Make one update, by SGD and with draws held still; by how much each variable moved."""
    keras.utils.set_random_seed(0)
    model = kind.build()
    for name, value in list(vars(model).items()):
        if isinstance(value, keras.optimizers.Optimizer):
            setattr(model, name, keras.optimizers.SGD(1.0))
    data = kind.data(ROWS)
    fit = {"verbose": 0, "shuffle": False}
    if isinstance(data[0], tf.data.Dataset):
        data = (data[0].rebatch(ROWS),)
    else:
        fit["batch_size"] = ROWS
    if not model.built and type(model).call is not keras.Model.call:
        model(keras.utils.unpack_x_y_sample_weight(a_batch(data))[0])
    with still():
        before = [np.array(one) for one in model.trainable_variables]
        if micro_batch_size is not None:
            kbatch.accumulate_gradients(model, micro_batch_size, **options)
        model.fit(*data, **fit)
    after = [np.array(one) for one in model.trainable_variables]
    return [new - old for new, old in zip(after, before, strict=True)]


def a_batch(data):
    """The rows as one batch, as Keras's train step gets it."""
    if isinstance(data[0], tf.data.Dataset):
        return next(iter(data[0].rebatch(2 * ROWS)))
    return data if len(data) > 1 else data[0]


@contextmanager
def still():
    """Draw the same for each row, by Keras and by TensorFlow, and leave dropout out."""

    def normal(shape, dtype=tf.float32):
        drawn = keras.random.normal(shape, dtype=dtype)
        return tf.ensure_shape(drawn, constant_value_as_shape(tf.convert_to_tensor(shape)))

    def uniform(shape, minval, maxval, dtype):
        return tf.cast(keras.random.uniform(shape, minval, maxval), dtype)

    drawn = mock.patch.multiple(tf.random, normal=normal, uniform=uniform)
    with still_draws(), drawn:
        yield


def first_sentence(error) -> str:
    return re.split(r"[:.] ", str(error).strip())[0]


HEAD = """| Kind | What is difficult | Searched | With micro-batches | With `exact=True` |
|---|---|---|---|---|
"""


def row(kind: Kind) -> str:
    """The row of a kind in the table of the docs."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            search = searched(kind, directory)
        except Exception as error:
            search = f"refused: {first_sentence(error)}"
    parts, _ = in_parts(kind)
    exact = "not needed"
    if parts != "exact":
        exact, _ = in_parts(kind, exact=True)
    return f"| {kind.name} | {kind.feature} | {search} | {parts} | {exact} |"


def rows_of(page: Path) -> dict[str, str]:
    """The rows of the table there, by kind."""
    text = page.read_text(encoding="utf-8")
    names = {kind.name for kind in KINDS}
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {name: line for line in rows if (name := line.split(" | ")[0][2:]) in names}


def write_rows(rows: dict[str, str]) -> None:
    """Put rows into the table of the page, in the order of the kinds."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    tail = re.sub(r"\A(\|.*\n)*", "", rest)
    known = rows_of(PAGE) | rows
    lines = [known[kind.name] for kind in KINDS if kind.name in known]
    PAGE.write_text(head + HEAD + "\n".join(lines) + "\n" + tail, encoding="utf-8")


if __name__ == "__main__":
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wanted = [kind for kind in KINDS if kind.name in sys.argv[1:] or not sys.argv[1:]]
    for kind in wanted:
        line = row(kind)
        print(line, flush=True)
        write_rows({kind.name: line})
