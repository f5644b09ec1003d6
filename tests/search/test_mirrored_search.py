"""Searches under MirroredStrategy on two logical CPUs, in their own process.

Logical devices must be made before TensorFlow's first use. So `python test_mirrored_search.py
FOLDER` searches and prints the records.
"""

import dataclasses
import json
import sys

import keras_tuner
import pytest
import small_models as models
from own_process import printed, two_replicas

import kbatch

pytestmark = pytest.mark.slow  # Five searches over two replicas.

ROWS = 94


def searched(directory, name, strategy, micro_batch_size=3, batch_sizes=(8, 32), **how):
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: models.mlp(optimizer="sgd"),
        batch_sizes,
        micro_batch_size=micro_batch_size,
        seed=0,
        **({"dtype_policy": "float32"} | how),
    )
    place = {"directory": directory, "project_name": name}
    tuner = keras_tuner.GridSearch(
        hypermodel, "val_accuracy", distribution_strategy=strategy, **place
    )
    validation = models.rows(31, seed=1)  # One batch of 32, of which two have unequal shares.
    tuner.search(*models.rows(ROWS), validation_data=validation, epochs=2, verbose=0)
    runs = [trial.executions[0] for trial in kbatch.load_study(tuner).trials]
    return [
        dataclasses.asdict(run) | {"accumulation_steps": run.accumulation_steps} for run in runs
    ]


def main(directory):
    strategy = two_replicas()
    results = {
        "one": searched(directory, "one", None),
        "two": searched(directory, "two", strategy),
        "whole": searched(directory, "whole", strategy, None),
        "auto": searched(directory, "auto", strategy, "auto", (64,), dtype_policy=None),
    }
    refused = []
    for how in ({"batch_sizes": (5, 8)}, {"steps_per_execution": 3}):
        try:
            searched(directory, f"refused {len(refused)}", strategy, **how)
        except keras_tuner.errors.FatalValueError as error:
            refused.append(str(error))
    print(json.dumps(results | {"refused": refused}))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return printed(__file__, tmp_path_factory.mktemp("mirrored"))


@pytest.mark.parametrize("name", ["one", "two", "whole"])
def test_mirrored_search_counts_every_example_once(found, name):
    assert [run["batch_size"] for run in found[name]] == [8, 32]
    for run in found[name]:
        batches = -(-ROWS // run["batch_size"])
        assert run["status"] == "completed"
        assert run["batch_size_seen"] == run["batch_size"]
        assert run["examples_seen"] == 2 * ROWS
        assert run["batches"] == run["updates"] == 2 * batches
        assert [epoch["examples"] for epoch in run["epochs"]] == [ROWS, ROWS]
        assert [epoch["batches"] for epoch in run["epochs"]] == [batches, batches]
        assert sum(run["window_examples"]) < 2 * ROWS


def test_mirrored_search_refuses_uneven_sizes_and_several_steps(found):
    uneven, several = found["refused"]
    assert "multiples of 2" in uneven
    assert "leave out `steps_per_execution`" in several


def test_mirrored_search_trains_in_float32_by_default(found):
    """The loss scale of Keras looks at the gradients of the first replica alone."""
    (run,) = found["auto"]
    assert run["dtype_policy"] == "float32"
    (note,) = [note for note in run["notes"] if "float32" in note]
    assert "Keras checks only the first replica" in note


def test_mirrored_search_batch_of_all_and_micro_batch_of_each_replica(found):
    names = "replicas", "micro_batch_size", "accumulation_steps"
    sizes = {
        search: [tuple(run[name] for name in names) for run in runs]
        for search, runs in found.items()
        if search != "refused"
    }
    assert sizes == {
        # A validation batch of three would not be shared evenly by two.
        "one": [(1, 3, 3), (1, 3, 11)],
        "two": [(2, 3, 2), (2, 3, 6)],
        "whole": [(2, 4, 1), (2, 16, 1)],
        # All of a batch of 64 fits, which is 32 for each of two.
        "auto": [(2, 32, 1)],
    }


@pytest.mark.parametrize(("other", "most"), [("one", 1e-3), ("whole", 1e-5)])
def test_mirrored_search_in_parts_equals_one_device_and_whole_batches(found, other, most):
    for one, two in zip(found[other], found["two"], strict=True):
        for first, second in zip(one["epochs"], two["epochs"], strict=True):
            assert first["metrics"]["loss"] == pytest.approx(second["metrics"]["loss"], rel=most)


if __name__ == "__main__":
    main(sys.argv[1])
