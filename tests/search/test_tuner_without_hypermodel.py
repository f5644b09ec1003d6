"""A search by the tuner alone: it makes the hypermodel, and finds sizes by the data."""

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.search.hypermodel import BatchSizeHyperModel
from kbatch.search.tuner_arguments import default_batch_sizes
from kbatch.training.build_function import as_hypermodel
from kbatch.training.data.training_data import TrainingData

DATA = models.rows(400)


def tuner_in(directory, **arguments):
    return kbatch.BatchSizeTuner(models.stock, "val_accuracy", directory=directory, **arguments)


def test_the_two_constructors_have_at_most_25_arguments():
    counts = [
        len(inspect.signature(d).parameters) for d in (kbatch.BatchSizeTuner, BatchSizeHyperModel)
    ]
    assert sum(counts) <= 25


def test_a_build_function_is_searched_over_the_sizes_that_the_data_fill(tmp_path):
    tuner = tuner_in(tmp_path)
    with pytest.raises(FileNotFoundError):
        _ = tuner.study
    with pytest.raises(RuntimeError, match="call `search` first"):
        tuner.get_best_hyperparameters()
    tuner.search(*DATA, validation_split=0.2, verbose=0)
    study = tuner.study
    # 320 rows train: they fill 32 ten times.
    assert [trial.batch_size for trial in study.trials] == [16, 32]
    assert study.search.settings["base_batch_size"] == 32
    assert [trial.executions[0].scaling.rule for trial in study.trials] == ["linear", "linear"]
    # Without a seed one is drawn, which all sizes share.
    (seed,) = {trial.executions[0].seed for trial in study.trials}
    assert seed is not None and seed == study.search.settings["seed"]
    again = tuner_in(tmp_path)
    again.search(*DATA, validation_split=0.2, verbose=0)
    assert again.study == study
    assert again.get_best_hyperparameters()[0].get("batch_size") in (16, 32)


def test_sizes_that_are_given_are_searched(tmp_path):
    tuner = tuner_in(tmp_path, batch_sizes=(8,))
    tuner.search(*DATA, validation_split=0.2, verbose=0)
    assert [trial.batch_size for trial in tuner.study.trials] == [8]
    found = tuner.study.decide()
    assert (found.batch_size, found.certain) == (8, False)
    assert tuner.study == kbatch.load_study(Path(tuner.project_dir))


ROWS = np.zeros((4000, 8), "float32"), np.zeros(4000, int)
DATASET = tf.data.Dataset.from_tensor_slices(ROWS)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return ROWS[0][:100], ROWS[1][:100]


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        (ROWS, 256),
        ((np.zeros((128, 8), "float32"), np.zeros(128, int)), 16),
        ((np.zeros((10**6, 8), "float32"), np.zeros(10**6, int)), 1024),
        ((DATASET,), 256),
        ((DATASET.batch(100),), 256),
        ((Batches(),), 256),
        ((lambda size: DATASET.batch(size),), 256),
    ],
)
def test_the_data_fill_the_largest_size_eight_times(arguments, largest):
    sizes = default_batch_sizes(
        as_hypermodel(models.stock), TrainingData(*arguments), parallel=False
    )
    assert sizes == kbatch.powers_of_two(16, largest)


@pytest.mark.parametrize(
    ("arguments", "parallel", "message"),
    [
        ((DATASET.repeat(),), False, "give `batch_sizes`"),
        ((DATASET.filter(lambda *_: True),), False, "type .*Dataset"),
        ((lambda size: DATASET.batch(size),), True, "give `batch_sizes`"),
        ((np.zeros((127, 8)), np.zeros(127)), False, "for 127 examples"),
        ((), False, "`x` is missing"),
    ],
)
def test_where_the_data_do_not_say_sizes_must_be_given(arguments, parallel, message):
    with pytest.raises(ValueError, match=message):
        default_batch_sizes(
            as_hypermodel(models.stock), TrainingData(*arguments), parallel=parallel
        )
