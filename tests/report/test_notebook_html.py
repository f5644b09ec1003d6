"""How records look in a notebook and when they are printed."""

import dataclasses
import html.parser
import re

import inference_factory
import input_profile_factory
import pytest
from figure_studies import learned_study, max_batch_result, tuned_study
from recommendation_factory import make_recommendation
from records_factory import make_study
from training_profile_factory import training_profile

from kbatch.study.study import Study

RECORDS = {
    "study": make_study,
    "three executions": lambda: learned_study(3),
    "largest batch": max_batch_result,
    "inference": inference_factory.make_profile,
    "input": input_profile_factory.make_profile,
    "recommendation": make_recommendation,
}


class Checker(html.parser.HTMLParser):
    """Follows the tags: what is open, which there were, and the text."""

    VOID = ("br", "img", "hr", "meta", "input")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("name", RECORDS)
def test_it_is_whole_html_without_what_notebooks_take_away(name):
    page = Checker(RECORDS[name]()._repr_html_())
    assert page.open == []
    assert not {"script", "style", "link", "body"} & set(page.tags)
    assert "table" in page.tags


def test_a_study_shows_its_decision_and_its_trials():
    page = Checker(make_study()._repr_html_())
    assert (
        "Batch size 64 had the best validation accuracy, 0.9810, but is not told apart" in page.text
    )
    assert page.tags.count("tr") == 1 + 7
    assert "out of memory" in page.text
    assert "CPU, 16 cores" in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_of_many_trials_the_first_are_shown_and_the_rest_counted():
    shown = tuned_study(100)._repr_html_()
    page = Checker(re.sub(r"<details open>.*?</details>", "", shown, flags=re.DOTALL))
    assert page.tags.count("tr") == 1 + 40
    assert "60 more rows" in page.text


def test_a_name_is_no_markup():
    page = make_study(name="<b>digits</b>", problems=("<script>",))._repr_html_()
    assert "<b>digits" not in page
    assert "<script>" not in page


def test_an_empty_study_says_what_to_run():
    page = Checker(Study("digits", ())._repr_html_())
    assert "kbatch demo" in page.text


def test_a_record_without_a_report_is_shown_as_text():
    page = training_profile()._repr_html_()
    assert page is None or "table" in Checker(page).tags


@pytest.mark.parametrize("name", RECORDS)
def test_printed_it_is_one_short_line(name):
    record = RECORDS[name]()
    assert "\n" not in repr(record)
    assert len(repr(record)) < 160
    assert type(record).__name__ in repr(record)


def test_the_lines_tell_what_matters():
    assert repr(make_study()) == (
        "<Study 'digits': 7 trials, 6 completed, batch sizes 16 to 4096, "
        "batch size 64 with val_accuracy 0.981>"
    )
    assert repr(Study("empty", ())) == "<Study 'empty': 0 trials, 0 completed>"
    assert repr(max_batch_result()).startswith("<MaxBatchSizeResult: 2250 examples, 85 % of 8 GiB")
    assert "micro-batch sizes 1 to 256" in repr(training_profile())
    trial = make_study().trials[0]
    assert repr(trial).startswith("<TrialRecord '0016': batch size 16, mixed_float16, completed")
    assert repr(trial.executions[0]).startswith("<ExecutionRecord completed: batch size 16")


def test_a_trial_of_long_training_is_printed_as_shortly():
    trial = make_study().trials[0]
    long = dataclasses.replace(trial.executions[0], epochs=trial.executions[0].epochs * 500)
    assert len(repr(dataclasses.replace(trial, executions=(long,) * 5))) < 160
