"""Records that an earlier version wrote load, and make reports, in this one."""

from pathlib import Path

import pytest

from kbatch.report.content import load_record
from kbatch.report.pages import write_report

STORED = Path(__file__).parent / "stored" / "version-0.1.0"
FOLDERS = {"grid": 3, "grid-auto": 4, "goodput": 2, "hyperband": 3, "random": 3}
FILES = {
    "grid-study": "Study",
    "max-batch": "MaxBatchSizeResult",
    "training": "TrainingProfile",
    "inference": "InferenceProfile",
    "input": "InputPipelineProfile",
    "recommendation": "Recommendation",
}


@pytest.mark.parametrize(("name", "trials"), FOLDERS.items())
def test_a_search_of_an_earlier_version_loads_whole(name, trials):
    study = load_record(STORED / name)
    assert study.problems == ()
    assert len(study.trials) == len(study.to_dataframe()) == trials
    assert study.search is not None
    assert (study.goodput is not None) == (name == "goodput")


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_a_record_of_an_earlier_version_loads(name, kind):
    assert type(load_record(STORED / f"{name}.json")).__name__ == kind


# What `grid`, `random` and the saved study hold, the report of `grid-auto` shows too.
REPORTED = ["grid-auto", "goodput", "hyperband"]
REPORTED += [f"{name}.json" for name in FILES if name != "grid-study"]


@pytest.mark.parametrize("name", REPORTED)
def test_a_record_of_an_earlier_version_makes_a_report(name, tmp_path):
    *_, page = write_report(load_record(STORED / name), tmp_path / "report.html")
    assert page.stat().st_size > 10_000


def test_a_saved_study_is_the_search_it_was_saved_from():
    saved, search = load_record(STORED / "grid-study.json"), load_record(STORED / "grid")
    assert saved.trials == search.trials
