"""The record of a search by goodput, and its words."""

import dataclasses

import pytest
from records_factory import make_study, make_trial

from kbatch.records.json_codec import read_record
from kbatch.study.answer import size_decision_text
from kbatch.study.caveats import caveats
from kbatch.study.study import GoodputRecord, SizeDecision, Study, read_goodput, write_goodput

PILOT = SizeDecision(64, "pilot")
STOP = SizeDecision(None, "separated", best=64, rival=128, probability=0.07)
RECORD = GoodputRecord((32, 64, 128), (0.01, 0.02, 0.03), (), 2.5, (PILOT, STOP))


def test_it_is_read_as_it_was_written(tmp_path):
    write_goodput(RECORD, tmp_path)
    assert read_goodput(tmp_path) == RECORD
    (tmp_path / "kbatch-goodput.json").write_text("{")
    assert read_goodput(tmp_path) is None
    assert read_goodput(tmp_path / "elsewhere") is None


def test_a_repeated_decision_is_kept_once():
    assert RECORD.with_decision(STOP) == RECORD
    assert RECORD.with_decision(PILOT).decisions == (PILOT, STOP, PILOT)


def test_sizes_and_times_belong_together():
    with pytest.raises(ValueError, match="Received: 1 and 2"):
        GoodputRecord((32,), (0.1, 0.2), (), 1.0)


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (PILOT, "64 comes first"),
        (SizeDecision(32, "no target yet"), "32 comes next"),
        (SizeDecision(128, "gain", 64, 256, 0.4), "probability of 40 %"),
        (SizeDecision(128, "beside", 64, 128, 0.4), "better than 64, which still runs, with"),
        (STOP, "no other batch size is likely to be as good as 64"),
        (SizeDecision(None, "tie", 64, 128, 0.1), "hardly better: 128 is more than 5 % better"),
        (SizeDecision(None, "all tried", 64), "could not be trained."),
        (SizeDecision(None, "all tried"), "could not be trained. None reached the target."),
        (SizeDecision(32, "given"), "32 comes first: it is the base batch size"),
        (SizeDecision(64, "pilot", hyperparameters={"units": 8}), "(units 8)."),
    ],
)
def test_every_decision_has_its_words(decision, words):
    assert words in size_decision_text(decision)


def test_the_report_says_what_was_left_out_and_why(tmp_path):
    study = dataclasses.replace(make_study(make_trial(64)), goodput=RECORD)
    texts = [caveat.text for caveat in caveats(study)]
    assert any("1 batch size of 3" in text and "32 and 128" in text for text in texts)
    assert size_decision_text(STOP) in texts
    study.save(tmp_path / "study.json")
    assert read_record(Study, tmp_path / "study.json").goodput == RECORD
    assert not any("goodput" in caveat.text for caveat in caveats(make_study()))
