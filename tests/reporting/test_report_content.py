import dataclasses

import pytest
from records_factory import (
    make_environment,
    make_epochs,
    make_execution,
    make_search,
    make_study,
    make_trial,
)

from kbatch.records.study import Study
from kbatch.records.trial import Objective
from kbatch.reporting.caveats import caveats, one_line
from kbatch.reporting.decision import decision
from kbatch.reporting.report_content import report_content


def repeated(batch_size, *accuracies, rate=1000):
    return make_trial(
        batch_size,
        *(make_execution(batch_size, accuracies=(a,), rate=rate) for a in accuracies),
    )


def caveat(study, words):
    return [text for text in caveats(study) if words in text]


def test_the_decision_names_size_value_speed_and_what_was_compared():
    found = decision(make_study())
    assert found.headline == "Batch size 64 had the best validation accuracy: 0.9810."
    assert found.speed == (
        "It trained at 5,850 samples/s, 39 % of the fastest trial (batch size 512, "
        "14,900 samples/s)."
    )
    assert found.compared == (
        "Compared: 7 batch sizes from 16 to 4,096 in 7 trials, 1 execution each, trained for "
        "2 epochs, on CPU, 16 cores."
    )
    assert "single execution without an interval" in found.certainty


def test_intervals_decide_whether_the_best_can_be_told_apart():
    clear = make_study(repeated(16, 0.90, 0.91, 0.90), repeated(32, 0.97, 0.98, 0.97))
    assert "overlaps that of no other trial" in decision(clear).certainty
    close = make_study(
        repeated(16, 0.95, 0.97, 0.96), repeated(32, 0.96, 0.98, 0.97), repeated(64, 0.5, 0.5, 0.5)
    )
    assert decision(close).certainty == (
        "It cannot be told apart from batch size 16: their 95 % intervals overlap."
    )


def test_the_policy_is_named_where_there_are_several():
    study = make_study(
        make_trial(16, dtype_policy="float32"), make_trial(32, accuracies=(0.99,), rate=9000)
    )
    assert decision(study).headline.startswith("Batch size 32 under mixed_float16 had the best")
    assert decision(study).speed == "It was also the fastest, with 9,000 samples/s."


def test_throughput_as_the_objective_has_its_unit():
    fastest = Objective("samples_per_second", "max")
    study = make_study(*(make_trial(s, objective=fastest, rate=100 * s) for s in (16, 32)))
    assert decision(study).headline == "Batch size 32 had the best throughput: 3,200 samples/s."


def test_without_a_completed_trial_no_size_is_named():
    study = make_study(make_trial(64, status="failed"), make_trial(128, status="out_of_memory"))
    assert decision(study).headline == (
        "No batch size can be named: none of 2 trials completed (1 failed and 1 out of memory)."
    )
    assert "none of them completed" in decision(study).compared


def test_the_only_completed_trial_was_not_compared():
    study = make_study(make_trial(64), make_trial(128, status="failed"))
    assert "only trial that completed" in decision(study).certainty


def test_equal_epochs_are_said_to_favour_small_batches():
    (text,) = caveat(make_study(), "Equal-epochs budget")
    assert "batch size 512 made 6 updates and batch size 16 made 180" in text
    assert "favours small batches" in text
    assert caveat(make_study(make_trial(64)), "Equal-epochs") == []
    other = make_study(make_trial(16), make_trial(32, accuracies=(0.9,)))
    assert caveat(other, "Equal-epochs") == []
    assert caveat(other, "executions had 1 to 2 epochs") != []


@pytest.mark.parametrize(("share", "said"), [(0.19, False), (0.21, True)])
def test_much_waiting_for_data_measures_the_input_pipeline(share, said):
    study = make_study(make_trial(16, train_s=10.0, data_wait_s=10 * share), make_trial(32))
    found = caveat(study, "input pipeline")
    assert bool(found) is said
    assert all("batch size 16:" in text for text in found)


@pytest.mark.parametrize(("slow_s", "said"), [(0.1, False), (0.2, True)])
def test_unstable_timing_is_named(slow_s, said):
    durations = (0.1, 0.1, slow_s, slow_s)
    study = make_study(
        make_trial(16, window_examples=(10,) * 4, window_durations_s=durations), make_trial(32)
    )
    assert bool(caveat(study, "not stable at batch size 16")) is said


@pytest.mark.parametrize(("load", "said"), [(None, False), (8.0, False), (8.1, True)])
def test_a_busy_machine_is_named(load, said):
    search = dataclasses.replace(make_search(), environment=make_environment(load_average=load))
    assert bool(caveat(make_study(search=search), "load average")) is said


def test_failures_problems_and_notes_are_told_with_their_batch_size():
    study = make_study(
        make_trial(16, notes=("Everyone's note.", "Only here.")),
        make_trial(32, notes=("Everyone's note.",), status="failed"),
        problems=("trial_9/kbatch.json is damaged",),
    )
    assert caveat(study, "trial_9/kbatch.json") != []
    assert "the loss is not finite" in caveat(study, "Batch size 32 (mixed_float16)")[0]
    assert caveat(study, "Only here.") == ["At batch size 16: Only here."]
    assert caveat(study, "Everyone's note.") == ["Everyone's note."]


def test_a_smaller_batch_than_asked_for_is_told():
    study = make_study(make_trial(64, batch_size_seen=40), make_trial(32))
    assert "read this trial as batch size 40" in caveat(study, "Batch size 64 was asked for")[0]
    assert caveat(study, "Batch size 32 was asked for") == []


def test_a_single_execution_is_told():
    assert caveat(make_study(), "one execution has no interval") != []
    assert caveat(make_study(repeated(16, 0.9, 0.9)), "one execution has no interval") == []


def test_a_long_failure_becomes_one_short_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("word " * 500)) == 300


def test_the_content_says_how_to_reproduce_and_where_it_was_measured():
    content = report_content(make_study())
    assert content.command == "python examples/digits.py --seed 0"
    assert ("seed", "0") in content.settings
    assert ("batch_sizes", "[16, 32, 64, 128]") in content.settings
    assert ("seeds of the executions", "0") in content.settings
    assert ("Host memory", "64.0 GiB") in content.environment
    assert ("tensorflow", "2.21.0") in content.environment


def test_without_the_search_file_there_is_still_a_report():
    content = report_content(Study("digits", make_study().trials))
    assert (content.command, content.environment) == (None, ())
    assert "a device that was not recorded" in content.decision.compared


def test_what_the_system_does_not_tell_is_not_available():
    environment = make_environment(memory_bytes=None, load_average=None)
    search = dataclasses.replace(make_search(), environment=environment)
    facts = dict(report_content(make_study(search=search)).environment)
    assert facts["Host memory"] == "n/a (the system does not tell)"
    assert facts["Load average at the start"] == "n/a (the system does not tell)"


def test_an_epoch_without_the_metric_leaves_a_trial_without_the_objective():
    objective = Objective("val_auc", "max")
    study = make_study(make_trial(64, objective=objective, epochs=make_epochs((0.9,))))
    assert "no completed trial has the objective val_auc" in decision(study).headline
