import base64
import dataclasses
import json
import zlib

import numpy as np
import pytest
from records_factory import make_execution

from kbatch.records.json_codec import RecordError, read_record, write_record
from kbatch.records.training_run import MOST_BLOCKS, ExecutionRecord, Outcomes

KNOWN = {"metric": "val_accuracy", "epoch": 3, "key": "k", "set_key": "s"}


def make_outcomes(values, *, examples=None, block_examples=3):
    examples = block_examples * len(values) - 1 if examples is None else examples
    return Outcomes.of(
        np.asarray(values), examples=examples, block_examples=block_examples, **KNOWN
    )


@pytest.mark.parametrize("blocks", [1, 2, MOST_BLOCKS])
def test_the_values_come_back_as_float32_holds_them(blocks, tmp_path):
    values = np.random.default_rng(0).normal(size=blocks).astype("float32")
    execution = make_execution(outcomes=make_outcomes(values))
    write_record(execution, tmp_path / "r.json")
    found = read_record(ExecutionRecord, tmp_path / "r.json")
    assert found == execution
    np.testing.assert_array_equal(found.outcomes.values, values)


def test_a_value_for_each_of_a_million_examples_takes_few_bytes():
    values = np.random.default_rng(0).normal(size=MOST_BLOCKS)
    outcomes = make_outcomes(values, examples=1_000_000, block_examples=1954)
    assert len(json.dumps(dataclasses.asdict(outcomes))) < 3_000


def test_why_there_are_none_is_kept(tmp_path):
    execution = make_execution(outcomes=Outcomes(reason="the metric is no mean over examples"))
    write_record(execution, tmp_path / "r.json")
    outcomes = read_record(ExecutionRecord, tmp_path / "r.json").outcomes
    assert outcomes == execution.outcomes
    assert outcomes.values is None


def test_a_file_without_outcomes_is_read(tmp_path):
    write_record(make_execution(), tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    del document["record"]["outcomes"]
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert read_record(ExecutionRecord, tmp_path / "r.json").outcomes is None


@pytest.mark.parametrize(
    "changed",
    [
        {"data": "no base64!"},
        {"data": base64.b64encode(b"no zlib").decode()},
        {"data": base64.b64encode(zlib.compress(bytes(4 * 10_000_000))).decode()},
        {"data": base64.b64encode(zlib.compress(bytes(7))).decode()},
        {"data": None},
        {"reason": "there are values"},
        {"examples": 100},
        {"examples": None},
        {"block_examples": 0},
        {"key": None},
        {"epoch": -1},
    ],
)
def test_damage_is_found_when_the_file_is_read(changed, tmp_path):
    write_record(make_execution(outcomes=make_outcomes([0.5, 1.0])), tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    document["record"]["outcomes"] |= changed
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"r\.json is no kbatch record or is damaged"):
        read_record(ExecutionRecord, tmp_path / "r.json")


@pytest.mark.parametrize("values", [[np.nan], [np.inf, 0.0], [], np.zeros(MOST_BLOCKS + 1)])
def test_values_that_no_comparison_could_use_are_refused(values):
    with pytest.raises(ValueError, match="`data` must hold"):
        make_outcomes(values, block_examples=1, examples=max(1, len(values)))
