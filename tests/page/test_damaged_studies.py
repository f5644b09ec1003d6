"""Damaged records: a record is named and left out, or everything that reads it works."""

import copy
import dataclasses
import json
import random
import warnings

import pytest
from figure_studies import gpu_study, learned_study, rates_study, target_study, tuned_study
from record_samples import RECORDS
from records_factory import make_search, make_study, make_trial, write_search

import kbatch
from kbatch.cli.main import STUDY_FIGURES, load_result
from kbatch.errors import RecordError
from kbatch.records.json_codec import write_record
from kbatch.study.study import load_study

STUDIES = {
    "learned": lambda: learned_study(3, sizes=(16, 64, 256)),
    "target": lambda: target_study(2, sizes=(16, 64, 256)),
    "gpu": gpu_study,
    "rates": rates_study,
}
OTHERS = (None, True, "x", {"a": 1})


def damaged(document, rng):
    """Copy the document of a record with one to three of its fields changed or missing."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        by_field = {}
        for place in _places(document["record"], ("record",)):
            by_field.setdefault(tuple(k for k in place if isinstance(k, str)), []).append(place)
        # Choose a field, not a value, because most values belong to epochs.
        *parents, key = rng.choice(by_field[rng.choice(sorted(by_field))])
        owner = document
        for parent in parents:
            owner = owner[parent]
        if isinstance(owner, dict) and rng.random() < 0.3:
            del owner[key]
        else:
            owner[key] = rng.choice(OTHERS)
    return document


def _places(value, place):
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


# Settings that a race writes.
SETTINGS = {
    "batch_sizes": [16, 64, 256],
    "tolerance": 0.01,
    "confidence": 0.95,
    "strategy": "race",
    "base_batch_size": 16,
    "max_trainings": 40,
}


def project(folder, study):
    """Write the study as a search does, and return the files of trials and of the search."""
    settings = {**SETTINGS, **study.search.settings} if study.search else SETTINGS
    search = dataclasses.replace(study.search or make_search(), settings=settings)
    write_search(folder, *study.trials, search=search)
    return sorted(folder.glob("trial_*/kbatch.json")), folder / "kbatch.json"


def read_all(study):
    """Compute everything of a study except its figures."""
    assert repr(study)
    assert repr(study.decide())
    for table in (study.to_dataframe(), study.runs_to_dataframe(), study.runs_table()):
        assert table.to_csv().encode()
        assert table.to_json(orient="records")
    assert str(study.decide())
    assert str(study) and study.settings and study.figures()


def draw_all(study, layout="none"):
    for name in STUDY_FIGURES:
        try:
            axes = getattr(kbatch, f"plot_{name.replace('-', '_')}")(study)
        except ValueError as error:
            # The study has no data for this figure.
            assert "Received: " in str(error)
        else:
            axes.figure.set_layout_engine(layout)
            axes.figure.draw_without_rendering()


@pytest.mark.parametrize("name", STUDIES)
def test_load_study_with_damaged_files(name, tmp_path):
    files, search = project(tmp_path, STUDIES[name]())
    rng = random.Random(name)
    harmless, count = 0, 30
    for _ in range(count):
        file = search if rng.random() < 0.4 else rng.choice(files)
        whole = file.read_text()
        file.write_text(json.dumps(damaged(json.loads(whole), rng)))
        study = load_study(tmp_path)
        assert len(study.problems) <= 1
        assert all(str(file) in problem for problem in study.problems)
        lost = len(study.problems) if file != search else 0
        assert (len(study.trials), study.missing) == (len(files) - lost, lost)
        read_all(study)
        if not study.problems:
            harmless += 1
            if harmless == 1:
                draw_all(study)
        file.write_text(whole)
    assert 0 < harmless < count


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_load_result_with_a_damaged_file(name, tmp_path):
    path = tmp_path / "record.json"
    write_record(RECORDS[name], path)
    document = json.loads(path.read_text())
    rng = random.Random(name)
    reported = 0
    for _ in range(40):
        path.write_text(json.dumps(damaged(document, rng)))
        try:
            record = load_result(path)
        except RecordError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
        else:
            assert repr(record)
            assert record._repr_html_() and isinstance(record.figures(), tuple)
            reported += 1
    assert 1 <= reported < 40


def test_figures_with_markup_and_long_names():
    tuned = {f"hyperparameter_{n}": n for n in range(300)} | {"layer": "w" * 100_000}
    trials = (*tuned_study(6).trials, make_trial(64, hyperparameters=tuned))
    with warnings.catch_warnings():
        # Matplotlib warns if texts leave no room for the panels.
        warnings.simplefilter("error", UserWarning)
        draw_all(make_study(*trials, name="$\\frac$ a$_b$ {x} %s <b>"), layout="constrained")
