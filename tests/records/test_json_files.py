import os
import subprocess
import sys

import pytest
from records_factory import (
    make_environment,
    make_execution,
    make_gpu,
    make_search,
    make_study,
    make_trial,
    make_usage,
)

from kbatch.records.json_codec import read_record, write_record, write_whole_file
from kbatch.records.notes import Note
from kbatch.records.training_run import Outcomes
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

RECORDS = [
    make_execution(status="out_of_memory"),
    make_execution(notes=(Note.of("own_step_whole", size=3), Note.of("nothing_timed")), seed=None),
    make_execution(outcomes=Outcomes(metric="val_accuracy", values=(0.25, 1.0), key="k")),
    make_execution(outcomes=Outcomes(reason="no_sums")),
    make_execution(usage=make_usage()),
    make_execution(usage=make_usage(make_gpu(), make_gpu(energy_j=None, power_w=None))),
    make_trial(64, make_execution(), make_execution(seed=1), hyperparameters={"units": 8}),
    make_environment(devices=("GPU:0 X", "GPU:1 X")),
    make_search(),
    make_study(problems=("trial_3/kbatch.json is damaged",)),
    Study("empty", ()),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_write_record_round_trip(record, tmp_path):
    write_record(record, tmp_path / "new" / "record.json")
    assert read_record(type(record), tmp_path / "new" / "record.json") == record


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_write_record_not_finite_is_none(value, tmp_path):
    write_record(make_execution(first_step_s=value), tmp_path / "r.json")
    execution = read_record(type(make_execution()), tmp_path / "r.json")
    assert execution.first_step_s is None


def test_write_record_error_leaves_old_file(tmp_path):
    path = tmp_path / "kbatch.json"
    write_record(make_trial(64), path)
    with pytest.raises(TypeError):
        write_record(make_trial(32, hyperparameters={"layer": object()}), path)
    assert read_record(TrialRecord, path) == make_trial(64)
    assert os.listdir(tmp_path) == ["kbatch.json"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from kbatch.records.json_codec import write_whole_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole_file(Path(sys.argv[1]), b"new" * 1000)
except OSError as error:
    sys.exit(f"said: {error}")
"""


def test_write_whole_file_full_disk_leaves_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert "said:" in done.stderr
    assert "give a writable directory" in done.stderr
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_write_whole_file_folder_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="give a writable directory") as raised:
        write_whole_file(tmp_path / "taken" / "file", b"")
    assert "taken" in str(raised.value)
