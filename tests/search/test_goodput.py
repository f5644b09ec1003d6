"""Searches by goodput: real trials, and what decides between them."""

import dataclasses
import functools
import json
import tempfile
import threading
import types
from pathlib import Path

import fake_nvml
import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf
from fake_nvml import FakeGpu, FakeNvml
from records_factory import make_study, make_trial

import kbatch
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.errors import InputError
from kbatch.records.training_run import Budget
from kbatch.search.goodput_costs import sweep_throughput
from kbatch.search.trial_process import capped
from kbatch.study.answer import size_decision_text
from kbatch.study.caveats import caveats
from kbatch.study.study import read_goodput
from kbatch.training.callbacks import TimeBudget

X, _ = models.rows(256)
DATA = (X, np.argmax(X[:, :3], axis=1))
SIZES = (8, 16, 32, 64, 128)
UPDATES = keras_tuner.Objective("updates_to_target", "min")
SECONDS = keras_tuner.Objective("seconds_to_target", "min")


def hypermodel(**arguments):
    defaults = {"micro_batch_size": None, "dtype_policy": "float32"}
    return searches.hypermodel(
        lambda: models.mlp(optimizer=keras.optimizers.Adam(3e-3)), SIZES, **(defaults | arguments)
    )


def search(directory, objective=UPDATES, *, callbacks=(), target=0.9, fit=None, **arguments):
    ends = [kbatch.StopAtTarget("accuracy", target), kbatch.UpdateBudget(400)]
    return searches.search(
        directory,
        arguments.pop("hypermodel", None) or hypermodel(),
        kbatch.BatchSizeTuner,
        data=DATA,
        objective=objective,
        strategy="goodput",
        fit={"epochs": 100, "callbacks": [*ends, *callbacks], **(fit or {})},
        **arguments,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A search by updates to a target, in which nothing depends on the clock."""
    return search(tmp_path_factory.mktemp("goodput"))


def test_it_tries_some_sizes_and_says_why_it_stopped(found):
    study = kbatch.load_study(found)
    assert 1 <= len(study.trials) < len(SIZES)
    record = study.goodput
    assert record.batch_sizes == SIZES
    assert record.extrapolated == ()
    assert min(record.update_times_s) > 0
    assert [d.batch_size for d in record.decisions[:-1]] == [
        t.batch_size for t in sorted(study.trials, key=lambda t: t.trial_id)
    ]
    assert record.decisions[-1].batch_size is None
    assert record.decisions[-1].best == study.best_trial().batch_size


def test_fewer_updates_are_needed_of_larger_batches(found):
    assert kbatch.load_study(found).best_trial().batch_size == 128


class KilledAfter(keras.callbacks.Callback):
    """Interrupts the search when so many epochs have ended."""

    left = 0

    def on_epoch_end(self, epoch, logs=None):
        KilledAfter.left -= 1
        if KilledAfter.left == 0:
            raise KeyboardInterrupt


def figures(tuner):
    study = kbatch.load_study(tuner)
    trials = [(t.batch_size, t.cost("updates_to_target")) for t in study.trials]
    return trials, [(d.batch_size, d.kind) for d in study.goodput.decisions]


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_to_the_same_end(found, tmp_path):
    KilledAfter.left = 4
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, callbacks=[KilledAfter()])
    swept = read_goodput(tmp_path / "search").update_times_s
    KilledAfter.left = 0
    # Without the callback it would be another search, whose updates are timed again.
    tuner = search(tmp_path, callbacks=[KilledAfter()])
    assert figures(tuner) == figures(found)
    assert kbatch.load_study(tuner).goodput.update_times_s == swept


def test_a_search_that_ended_runs_nothing_more(found, capsys):
    before = figures(found)
    again = search(Path(found.project_dir).parent, fit={"verbose": 1})
    assert figures(again) == before
    assert "Stopped: " in capsys.readouterr().out


def test_a_target_that_is_never_met_is_tried_for_at_all_sizes(tmp_path):
    hypermodel = searches.stock(batch_sizes=(16, 32))
    study = kbatch.load_study(
        search(tmp_path, target=1.5, fit={"epochs": 1}, hypermodel=hypermodel)
    )
    assert [trial.batch_size for trial in study.trials] == [16, 32]
    assert study.goodput.decisions[-1].kind == "all tried"
    assert study.best_trial() is None
    assert size_decision_text(study.goodput.decisions[-1]).endswith("None reached the target.")


@pytest.mark.parametrize(
    ("objective", "callbacks"),
    [
        ("val_accuracy", []),
        (SECONDS, [TimeBudget(1)]),
        ("samples_per_second", [TimeBudget(1)]),
        (keras_tuner.Objective("samples_per_second", "max"), [TimeBudget(1)]),
        ([keras_tuner.Objective("val_accuracy", "max"), SECONDS], [TimeBudget(1)]),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, objective, callbacks):
    with pytest.raises(ValueError, match=r"seconds_to_target|direction"):
        searches.search(
            tmp_path,
            hypermodel(),
            kbatch.BatchSizeTuner,
            data=DATA,
            objective=objective,
            strategy="goodput",
            fit={"epochs": 1, "callbacks": callbacks},
        )


def test_a_metric_is_compared_within_a_time(tmp_path):
    tuner = searches.search(
        tmp_path,
        searches.stock(batch_sizes=(16, 32)),
        kbatch.BatchSizeTuner,
        data=DATA,
        objective="val_accuracy",
        strategy="goodput",
        fit={"epochs": 100, "callbacks": [TimeBudget(0.4)]},
    )
    study = kbatch.load_study(tuner)
    assert study.goodput.decisions[-1].batch_size is None
    assert {t.executions[0].budget for t in study.trials} == {Budget(train_s=0.4)}


def test_a_cap_ends_training_at_the_sooner_of_two_times():
    other = kbatch.UpdateBudget(5)
    assert capped([other], None) == [other]
    (kept, cap) = capped([TimeBudget(9.0), other], 2.0)
    assert (kept, cap.budget.train_s) == (other, 2.0)
    assert capped([TimeBudget(1.0)], 2.0)[0].budget.train_s == 1.0


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match="one device"):
        kbatch.BatchSizeTuner(
            hypermodel(), UPDATES, strategy="goodput", distribution_strategy=object()
        )


def test_other_hyperparameters_are_searched_one_after_the_other(tmp_path):
    def build(hp):
        hp.Choice("rate", [1e-3, 3e-3])
        return models.stock(optimizer=keras.optimizers.Adam(hp.get("rate")))

    wrapped = searches.stock(build, (32, 64))
    # Each trial meets it in its first epoch.
    study = kbatch.load_study(search(tmp_path, hypermodel=wrapped, target=0.01))
    rates = [t.hyperparameters["rate"] for t in sorted(study.trials, key=lambda t: t.trial_id)]
    assert rates == sorted(rates)
    assert set(rates) == {1e-3, 3e-3}
    stops = [d for d in study.goodput.decisions if d.batch_size is None]
    assert [d.hyperparameters for d in stops] == [{"rate": 1e-3}, {"rate": 3e-3}]


@pytest.mark.slow
def test_in_processes_of_their_own_trials_and_sweep_give_the_same(found, tmp_path):
    assert figures(search(tmp_path, isolate=True)) == figures(found)


def swept(hypermodel, *data, directory=None):
    space = keras_tuner.HyperParameters()
    hypermodel.build(space)
    tuner = types.SimpleNamespace(
        hypermodel=hypermodel,
        oracle=types.SimpleNamespace(get_space=lambda: space),
        project_dir=directory or tempfile.mkdtemp(),
    )
    return sweep_throughput(tuner, data, {})


def test_a_sweep_times_every_size_in_the_micro_batches_that_are_given():
    record = swept(searches.stock(batch_sizes=(8, 16, 32), micro_batch_size=8), *DATA)
    assert (record.batch_sizes, record.extrapolated) == ((8, 16, 32), ())
    assert min(record.update_times_s) > 0
    assert record.sweep_s > sum(record.update_times_s)


def test_the_clocks_of_a_sweep_are_in_its_record_and_named_where_they_differ(monkeypatch):
    fake_nvml.install(monkeypatch, FakeNvml(gpu := FakeGpu(sm_clock_mhz=1700)))
    here = functools.partial(GpuMonitor, find_gpus=lambda: {"00000000:01:00.0": ("GPU:0",)})
    monkeypatch.setattr("kbatch.throughput.update_timing.GpuMonitor", here)
    record = swept(searches.stock(batch_sizes=(8, 16)), *DATA)
    assert record.sm_clocks_mhz == (gpu.sm_clock_mhz,) * 2

    def notes(*clocks_mhz):
        goodput = dataclasses.replace(record, sm_clocks_mhz=clocks_mhz)
        study = dataclasses.replace(make_study(make_trial(8), make_trial(16)), goodput=goodput)
        return [c.text for c in caveats(study) if c.label == "GPU clocks differ"]

    assert notes() == notes(1700, None) == notes(1700, 1690) == []
    (text,) = notes(1700, 1200)
    assert "from 1,200 MHz at 16 to 1,700 MHz at 8" in text


def waiting(seconds):
    """A build function that cannot travel, for its lock: memory is measured in this process."""
    lock = threading.Lock()

    def held(rows):
        with lock:
            return seconds(rows)

    return lambda: models.waiting(held)


def under_auto(build, sizes):
    settings = {"dtype_policy": "float32", "memory_limit_bytes": 2**30}
    return searches.hypermodel(build, sizes, micro_batch_size="auto", **settings)


def test_under_auto_a_size_that_is_faster_in_parts_is_timed_in_parts():
    """The whole batch of 512 waits for half a second; 64 parts of 8 for 8 ms."""

    def seconds(rows):
        return 2e-6 * rows**2

    record = swept(under_auto(waiting(seconds), (8, 512)), *models.rows(600))
    assert record.extrapolated == ()
    assert record.update_times_s[1] < seconds(512)


def test_under_auto_no_more_go_through_at_once_than_were_found_to_fit(tmp_path):
    seen = []
    build = waiting(lambda rows: seen.append(rows) or 0.0)
    swept(under_auto(build, (8, 32)), *DATA, directory=tmp_path)
    kept = (tmp_path / "kbatch-micro-batches").glob("*.json")
    (file,) = (path for path in kept if not path.name.endswith("-parts.json"))
    content = json.loads(file.read_text())
    probe = content["record"]["probes"][0] | {"batch_size": 16}
    content["record"] |= {"max_batch_size": 16, "probes": [probe]}
    file.write_text(json.dumps(content))
    assert max(seen) == 32
    seen.clear()
    assert swept(under_auto(build, (8, 32)), *DATA, directory=tmp_path).extrapolated == ()
    assert max(seen) == 16


def test_sizes_beyond_what_a_data_function_gives_are_read_off_the_line():
    def batches(size):
        return tf.data.Dataset.from_tensor_slices(models.rows(40)).batch(size)

    record = swept(searches.stock(batch_sizes=(8, 16, 32, 64, 128)), batches)
    assert record.extrapolated == (64, 128)
    assert record.update_times_s[-1] >= max(record.update_times_s[:3])
    with pytest.raises(InputError, match=r"two batch sizes at least.*Received: 1 of 2"):
        swept(searches.stock(batch_sizes=(32, 64)), batches)


def test_data_that_do_not_suit_the_model_are_told_before_a_trial():
    with pytest.raises(InputError, match=r"\(examples, 8\): reshape it.*\(examples, 5\)"):
        swept(searches.stock(), X[:, :5], DATA[1])
