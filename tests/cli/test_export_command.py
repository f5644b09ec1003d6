import os
import sys

import pandas as pd
import pytest
from records_factory import make_study, make_trial

from kbatch.cli import main as cli


def exported(study, folder, suffix=".csv"):
    study.save(folder / "study.json")
    assert cli.main(["export", str(folder / "study.json"), "-o", str(folder / f"t{suffix}")]) == 0
    return folder / f"t{suffix}"


def test_numbers_stay_numbers(tmp_path):
    tuned = {"shift": -0.5, "exponent": -3, "written": "-1e-3", "layer": "relu"}
    study = make_study(make_trial(16, hyperparameters=tuned))
    (row,) = pd.read_csv(exported(study, tmp_path)).to_dict("records")
    assert {name: row[name] for name in tuned} == tuned | {"written": -0.001}


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_a_file_whose_name_is_no_text_is_written_and_named(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    path = exported(make_study(), folder)
    assert path.exists()
    assert "\\udce9" in capsys.readouterr().out
