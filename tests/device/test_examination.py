import pytest

from kbatch.device.doctor import Examination, Finding, PolicySpeed
from kbatch.records.json_codec import read_record, record_text, write_record


def test_a_ratio_is_the_median_over_the_rounds():
    """A round that was disturbed for both does not move it, nor one that was for one."""
    reference = PolicySpeed("float32", (1.0, 10.0, 1.0, 1.0, 1.0))
    half = PolicySpeed("mixed_float16", (2.0, 20.0, 2.0, 2.0, 90.0))
    assert half.times_as_fast_as(reference) == 0.5
    assert reference.times_as_fast_as(half) == 2.0
    assert half.times_as_fast_as(half) == 1.0


def test_it_is_complete_unless_something_is_missing():
    ok, warning, missing = (Finding("x", status, "") for status in ("ok", "warning", "missing"))
    assert Examination((ok, warning), (), None).complete
    assert not Examination((ok, missing), (), None).complete


def test_it_comes_back_from_a_file(tmp_path):
    record = Examination(
        (Finding("keras", "missing", "not installed", "pip install keras"), Finding("x", "ok", "")),
        (PolicySpeed("float32", (0.5, 0.25)),),
        None,
    )
    write_record(record, tmp_path / "record.json")
    assert read_record(Examination, tmp_path / "record.json") == record
    assert (tmp_path / "record.json").read_text() == record_text(record) + "\n"


def test_a_status_is_one_of_three():
    with pytest.raises(ValueError, match="`status` must be one of ok, warning, missing"):
        Finding("x", "fine", "")
