"""Errors contain only known values."""

import dataclasses
import pickle

import own_steps
import pytest

from kbatch.errors import OutOfMemoryError
from kbatch.memory.probe import no_example_fits
from kbatch.memory.workload import WorkloadFacts
from kbatch.records.training_run import Plan
from kbatch.search.plan import notes_on_size

FACTS = WorkloadFacts("GPU:0", 10_000, True, "float32", 90, 90, 64, ())


def of_one_example(needed_bytes):
    return no_example_fits(FACTS, (0.8, 0.9), needed_bytes, None)


def of_plan(**changed):
    """Return the error of a plan in which 24 of 64 examples fit on the device."""
    plan = dataclasses.replace(Plan(1, "float32", 24, "own_step", 64, ""), **changed)
    with pytest.raises(OutOfMemoryError) as caught:
        notes_on_size(plan, "auto", own_steps.gan(), 64)
    return caught.value


@pytest.mark.parametrize(
    ("make", "examples", "fitting", "limit_bytes"),
    [
        (lambda: of_one_example(9_500), 1, 0, 10_000),
        (lambda: of_one_example(None), 1, 0, 10_000),
        (of_plan, 64, 24, None),
        (lambda: of_plan(number=2), 64, None, None),
    ],
)
def test_out_of_memory_error_contains_known_values(make, examples, fitting, limit_bytes):
    error = make()
    known = (error.examples, error.fitting_examples, error.limit_bytes)
    assert known == (examples, fitting, limit_bytes)
    text = str(error).lower()
    assert ("one example does not fit" in text) == (fitting == 0)
    assert all(str(size) in text for size in (examples, fitting) if size and size > 1)
    assert ("at most" in text) == bool(fitting)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
