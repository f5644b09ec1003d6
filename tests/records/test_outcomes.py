"""Records of the metric by blocks of validation examples."""

import json

import numpy as np
import pytest
from records_factory import make_execution

from kbatch.records.json_codec import RecordError, read_record, write_record
from kbatch.records.training_run import REASONS, ExecutionRecord, Outcomes

KNOWN = {"metric": "val_accuracy", "examples": 7, "block_examples": 2, "key": "k", "set_key": "s"}


def test_the_values_come_back(tmp_path):
    values = tuple(np.random.default_rng(0).normal(size=50).tolist())
    execution = make_execution(outcomes=Outcomes(values=values, **KNOWN))
    write_record(execution, tmp_path / "r.json")
    found = read_record(ExecutionRecord, tmp_path / "r.json")
    assert found == execution
    assert found.outcomes.value == pytest.approx(np.mean(values), rel=1e-12)


@pytest.mark.parametrize("reason", REASONS)
def test_why_there_are_none_is_kept(reason, tmp_path):
    execution = make_execution(outcomes=Outcomes(reason=reason))
    write_record(execution, tmp_path / "r.json")
    outcomes = read_record(ExecutionRecord, tmp_path / "r.json").outcomes
    assert outcomes == execution.outcomes
    assert (outcomes.values, outcomes.value, outcomes.why) == ((), None, REASONS[reason])


def test_a_file_without_outcomes_is_read(tmp_path):
    write_record(make_execution(), tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    del document["record"]["outcomes"]
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert read_record(ExecutionRecord, tmp_path / "r.json").outcomes is None


@pytest.mark.parametrize(
    "changed",
    [
        {"values": "no list"},
        {"values": [0.5, 1e999]},
        {"values": None},
    ],
)
def test_damage_is_found_when_the_file_is_read(changed, tmp_path):
    execution = make_execution(outcomes=Outcomes(values=(0.5, 1.0), **KNOWN))
    write_record(execution, tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    document["record"]["outcomes"] |= changed
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"r\.json is no kbatch record or is damaged"):
        read_record(ExecutionRecord, tmp_path / "r.json")
