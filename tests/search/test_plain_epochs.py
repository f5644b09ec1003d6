"""What the size that a study names takes by plain `fit`, beside the base size."""

import dataclasses
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.records.training_run import PlainEpochs
from kbatch.search.plain_epochs import EpochPart, measure_plain_epochs
from kbatch.training.data.training_data import TrainingData


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A search whose larger size is named, and its data."""
    hypermodel = searches.stock(batch_sizes=(4, 64), base_batch_size=4)
    data = models.rows(400)
    tuner = searches.search(
        tmp_path_factory.mktemp("plain"),
        hypermodel,
        kbatch.BatchSizeTuner,
        data=data,
        objective=keras_tuner.Objective("samples_per_second", "max"),
    )
    return tuner, data


def forget(tuner):
    file = Path(tuner.project_dir) / "kbatch-plain-epochs.json"
    file.unlink(missing_ok=True)
    return file


def test_a_search_without_time_for_them_measures_nothing_more(ended):
    tuner, data = ended
    forget(tuner)
    measure_plain_epochs(tuner, TrainingData(*data), most_share=1e-4)
    assert kbatch.load_study(tuner).plain_epochs is None


def test_the_graphs_of_the_search_serve_every_size(ended):
    tuner, _ = ended
    models = []
    for trial in kbatch.load_study(tuner).trials:
        hp = tuner.oracle.get_space().copy()
        hp.values = dict(trial.hyperparameters)
        models.append(tuner.hypermodel.graph.model(tuner.hypermodel.build(hp)))
        assert float(models[-1].optimizer.learning_rate) == pytest.approx(trial.learning_rate)
    assert models[0] is models[1] and models[0].train_function is not None


def test_both_sizes_are_timed_with_the_settings_of_their_trials(ended):
    tuner, (x, y) = ended
    forget(tuner)
    measure_plain_epochs(tuner, TrainingData(x, y, validation_split=0.25), most_share=np.inf)
    study = kbatch.load_study(tuner)
    found = study.plain_epochs
    assert (found.batch_sizes, found.examples) == ((4, 64), 300)
    assert min(found.epoch_s) > 0
    measure_plain_epochs(tuner, TrainingData(x, y, validation_split=None), most_share=np.inf)
    assert kbatch.load_study(tuner).plain_epochs == found


def test_the_page_says_the_ratio_that_people_get_and_no_other(ended):
    study = kbatch.load_study(ended[0])
    assert study.decide().speedup.value > 0
    study = dataclasses.replace(study, plain_epochs=PlainEpochs((4, 64), (3.3, 1.0), 300))
    change = study.decide().page.change
    assert "3.3 times sooner by plain `fit`" in change
    assert change.count("times") == 1


def test_a_saved_study_keeps_them(ended, tmp_path):
    known = PlainEpochs((4, 64), (2.0, 1.0), 9)
    dataclasses.replace(kbatch.load_study(ended[0]), plain_epochs=known).save(tmp_path / "s.json")
    assert kbatch.load_study(tmp_path / "s.json").plain_epochs == known


def test_what_cannot_be_timed_is_found_before_anything_is_read(ended, monkeypatch):
    tuner, (x, y) = ended
    monkeypatch.setattr("kbatch.search.plain_epochs.load_study", None)
    measure_plain_epochs(tuner, TrainingData(x.tolist(), y))
    monkeypatch.setattr(tuner, "distribution_strategy", tf.distribute.OneDeviceStrategy("CPU:0"))
    measure_plain_epochs(tuner, TrainingData(x, y))


def test_sizes_without_room_beside_the_kept_model_are_not_timed(ended, monkeypatch):
    tuner, data = ended
    file = forget(tuner)

    def full(*_, **given):
        raise tf.errors.InternalError(None, None, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(keras.Model, "fit", full)
    measure_plain_epochs(tuner, TrainingData(*data), most_share=np.inf)
    assert not file.exists()


def test_certified_sizes_that_are_alike_in_time_are_timed_beside_them(ended, monkeypatch):
    tuner, (x, y) = ended
    forget(tuner)
    decide = kbatch.Study.decide
    monkeypatch.setattr(
        kbatch.Study,
        "decide",
        lambda self: dataclasses.replace(decide(self), base_batch_size=64, alike_in_time=(4, 64)),
    )
    measure_plain_epochs(tuner, TrainingData(x, y), most_share=np.inf)
    assert kbatch.load_study(tuner).plain_epochs.batch_sizes == (4, 64)


def test_each_size_is_timed_with_its_own_steps_an_execution(ended, monkeypatch):
    tuner, (x, y) = ended
    forget(tuner)
    decide, fit, seen = kbatch.Study.decide, keras.Model.fit, set()

    def decided(study):
        found = decide(study)
        trials = [
            dataclasses.replace(
                trial,
                executions=(dataclasses.replace(trial.executions[0], steps_per_execution=steps),),
            )
            for trial, steps in zip(found.trials, (5, 2), strict=True)
        ]
        return dataclasses.replace(found, trials=tuple(trials))

    def watched(model, *args, batch_size, **kwargs):
        seen.add((batch_size, int(model.steps_per_execution)))
        return fit(model, *args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr(kbatch.Study, "decide", decided)
    monkeypatch.setattr(keras.Model, "fit", watched)
    measure_plain_epochs(tuner, TrainingData(x, y), most_share=np.inf)
    assert seen == {(4, 5), (64, 2)}


def test_a_part_of_an_epoch_tells_what_all_of_it_takes(monkeypatch):
    # Executions of four steps, the first of which begins the iterator too.
    moments = iter([9.0, 9.4, 9.8])
    monkeypatch.setattr("kbatch.search.plain_epochs.time.perf_counter", lambda: next(moments))
    monkeypatch.setattr("kbatch.search.plain_epochs._STRETCH_S", 0.5)
    part = EpochPart(33)
    part.set_model(models.mlp())
    for batch, stopped in ((3, False), (7, False), (11, True)):
        assert part.rest_s == 0.0
        part.on_train_batch_end(batch)
        assert part.model.stop_training == stopped
    assert part.rest_s == pytest.approx(2.1)
    moments = iter([9.0, 9.4])
    part = EpochPart(6)  # It is over.
    part.set_model(models.mlp())
    part.on_train_batch_end(3)
    part.on_train_batch_end(7)
    assert part.rest_s == 0.0
