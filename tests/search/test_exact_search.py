"""A search cuts batches of a loss over the whole batch in the exact mode, where that repairs it."""

import keras
import pytest
import searches
import small_models

import kbatch
from kbatch.search.auto_micro_batch import MicroBatchCache, SearchMicroBatches
from kbatch.study.study import SearchRecord
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import sample_of

ops = keras.ops


def coupled(y_true, y_pred):
    """A mean over rows that are related by their spread."""
    return ops.mean(ops.square(ops.one_hot(y_true, 3) - y_pred)) / (0.1 + ops.std(y_pred))


def build():
    return small_models.mlp(optimizer="sgd", loss=coupled)


def searched(directory, build=build, **arguments):
    defaults = {"micro_batch_size": 8, "dtype_policy": "float32"}
    hypermodel = searches.hypermodel(build, (32,), **(defaults | arguments))
    tuner = searches.quick(directory, hypermodel)
    return kbatch.load_study(tuner)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return searched(tmp_path_factory.mktemp("whole"), micro_batch_size=None)


@pytest.mark.parametrize("exact", ["auto", True])
def test_a_batch_that_parts_would_change_trains_as_the_whole(tmp_path, whole, recwarn, exact):
    study = searched(tmp_path, exact=exact)
    trained, expected = (found.trials[0].executions[0] for found in (study, whole))
    assert trained.epochs[0].metrics["loss"] == pytest.approx(
        expected.epochs[0].metrics["loss"], rel=1e-5
    )
    note = next(note for note in study.trials[0].notes if note.code == "exact_mode")
    assert "differed by" in note
    assert study.trials[0].noise_scale is None
    assert searches.noted_columns(study)["exact mode"] == "noise_scale"
    assert not [one for one in recwarn if "Not equal" in str(one.message)]
    assert study.search.settings["exact"] == exact


def test_it_is_left_out_on_request_and_where_it_repairs_nothing(tmp_path):
    def normalised():
        found = [keras.layers.Input((8,)), keras.layers.BatchNormalization()]
        model = keras.Sequential([*found, keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with pytest.warns(UserWarning, match="Not equal to the whole batch"):
        plain = searched(tmp_path / "plain", exact=False)
    with pytest.warns(UserWarning, match="Not equal to the whole batch"):
        coupled_layer = searched(tmp_path / "layer", normalised)
    for study in (plain, coupled_layer):
        codes = {note.code for note in study.trials[0].notes}
        assert "exact_mode" not in codes
        assert codes & {"parts_differ", "batch_normalization_in_parts"}


@pytest.mark.parametrize("exact", ["auto", False])
def test_what_fits_and_what_is_fast_is_measured_in_the_mode_that_trains(exact):
    limits = {"memory_limit_bytes": None}
    search = SearchMicroBatches(largest_batch_size=32, exact=exact, **limits)
    source = sample_of(FitData(*small_models.rows(32)))
    cache = MicroBatchCache(search, build(), build, source, None)
    assert cache.halve(32) == 16
    assert ["exact" in name for name in search.known] == [exact is not False]
    assert cache.trains_whole_only() == (exact is False)


def test_another_mode_is_another_search():
    settings = searches.hypermodel(build).settings
    assert SearchRecord(settings | {"exact": False}, None).difference(settings) is not None


def test_another_value_is_refused():
    with pytest.raises(ValueError, match="exact='always'"):
        searches.hypermodel(build, exact="always")
