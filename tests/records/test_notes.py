"""Notes on a run: codes with values, and what a file may hold."""

import json
import pickle

import pytest
from records_factory import make_execution

from kbatch.records.json_codec import RecordError, read_record, record_text, write_record
from kbatch.records.notes import KINDS, Note
from kbatch.records.training_run import ExecutionRecord

VALUES = {
    "peaks_differ": {"refuted": 4},
    "gpu_shared": {"neighbours": "Another process holds memory of the GPU."},
    "measured_here": {"why": "gpu"},
    "rows_differ": {"elements": 8},
    "batch_normalization_in_parts": {"parts": "bn (BatchNormalization)"},
    "parts_differ": {"found": "the loss differed by 3 %", "source": "loss"},
    "parts_not_compared": {"found": "no comparison could be made"},
    "own_step_whole": {"size": 8},
    "cut_to_fit": {"size": 8, "reason": "memory", "more": " A note."},
    "memory_ran_out": {"before": 8, "after": 4, "plan": 2},
    "first_learning_rate": {"used": 0.01, "built": 0.001},
    "fitted_by_build": {"names": "`decay_steps`"},
    "steps_by_build": {"steps": 8},
    "one_step_an_execution": {"reason": "the model is run eagerly"},
    "resumed": {"epoch": 3},
    "metrics_of_parts": {"names": "auc"},
    "float32_instead": {"policy": "mixed_float16", "reason": "Layer Shifted cannot."},
    "own_path": {"callback": "CSVLogger", "own": "a/b.csv", "given": "b.csv"},
}


def every_note():
    return [Note.of(code, **VALUES.get(code, {})) for code in KINDS]


@pytest.mark.parametrize("note", every_note(), ids=lambda note: note.code)
def test_a_note_is_the_same_when_read_back_and_in_another_process(note, tmp_path):
    write_record(make_execution(notes=(note,)), tmp_path / "run.json")
    (read,) = read_record(ExecutionRecord, tmp_path / "run.json").notes
    sent = pickle.loads(pickle.dumps(note))
    for found in (read, sent):
        assert found == note and isinstance(found, str)
        assert (found.code, found.values) == (note.code, note.values)
        assert (found.label, found.column) == (note.label, note.column)


@pytest.mark.parametrize(
    "found",
    [
        3,
        None,
        "a text",
        ["a"],
        {"code": "unknown", "values": {}},
        {"code": "resumed"},
        {"code": 3, "values": {}},
    ]
    + [{"code": "resumed", "values": values} for values in ({}, {"size": 3}, [], {"epoch": [1]})]
    + [{"code": "first_learning_rate", "values": {"used": "long", "built": 0.1}}],
)
def test_a_damaged_note_is_a_damaged_record(found, tmp_path):
    document = json.loads(record_text(make_execution()))
    document["record"]["notes"] = [found]
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match="damaged"):
        read_record(ExecutionRecord, tmp_path / "run.json")
