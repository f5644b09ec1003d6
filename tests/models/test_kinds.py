"""Each kind of model: searched as it is, in parts as the whole or with a word, and in the docs."""

import math

import pytest
from fake_clock import FakeClock
from models.kinds import KINDS
from models.verdicts import PAGE, in_parts, rows_of, searched
from shared_worker import shared_worker

import kbatch

BY_NAME = {kind.name: kind for kind in KINDS}
# The others are slow tests.
QUICK = {"Distillation", "Two towers", "Loss endpoint"}


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with shared_worker():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=BY_NAME)
def test_search_of_a_kind_with_defaults(tmp_path, kind):
    # What differs from kind to kind shows in one trial, at a size that settings follow.
    assert searched(kind, tmp_path, (16,)).startswith("yes")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in BY_NAME]
)
def test_update_of_a_kind_in_parts_equals_whole_or_is_noted(name):
    found, _ = in_parts(BY_NAME[name])
    assert found == rows_of(PAGE)[name].split(" | ")[3]
    assert "silently" not in found


def test_the_table_of_the_docs_has_each_kind_and_its_feature():
    features = {name: row.split(" | ")[1] for name, row in rows_of(PAGE).items()}
    assert list(features.items()) == [(kind.name, kind.feature) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Encoder and decoder", "TabTransformer"])
def test_a_size_is_recommended_for_data_of_an_odd_form(name, monkeypatch):
    # The seconds of the budget are counted in readings: a slow machine makes as many updates.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=6e-3))
    kind, sizes = BY_NAME[name], (8, 16)
    settings = {"batch_sizes": sizes, "base_batch_size": 8, "time_budget_s": 6.0, "seed": 0}
    found = kbatch.recommend(kind.build, *kind.data(64), **settings)
    assert found.batch_size in sizes
    assert math.isfinite(found.learning_rate)
