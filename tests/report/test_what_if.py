"""What another batch size would do: the values, and the page that shows them."""

import dataclasses
import html
import json
import re

import inference_factory
import input_profile_factory
import pytest
from figure_studies import learned_study, max_batch_result, target_study
from recommendation_factory import make_memory, make_recommendation, make_timings
from records_factory import make_study
from training_profile_factory import left_out, point, training_profile

from kbatch.memory.record import ProbeRecord
from kbatch.report.content import report_content
from kbatch.report.pages import render_page
from kbatch.report.what_if import what_if
from kbatch.study.figures.goodput import goodput_info
from kbatch.study.figures.time_to_target import time_to_target_info


def study_of_a_target():
    """A study whose updates to the target follow the fitted curve."""
    return target_study(3, sizes=(128, 256, 512, 1024))


RECORDS = {
    "training": training_profile,
    "inference": inference_factory.make_profile,
    "memory": max_batch_result,
    "recommendation": make_recommendation,
    "goodput": lambda: learned_study(3),
    "target": study_of_a_target,
}


def readings(record, name):
    """The readings of a quantity, by batch size."""
    found = what_if(record)
    (quantity,) = [one for one in found.quantities if one.name == name]
    return dict(zip(found.sizes, quantity.readings, strict=True))


def page_of(*records):
    """The report without its figures, which take long to draw."""
    content = report_content(records)
    sections = tuple(section._replace(figures=()) for section in content.sections)
    return render_page(content._replace(sections=sections), "report.html")


def positions(page):
    """What each slider of a page looks up."""
    data = re.findall(r"data-positions='([^']*)'", page)
    return [json.loads(html.unescape(one)) for one in data]


def test_a_training_profile_has_its_measured_and_its_fitted_values():
    profile = training_profile()
    rates, steps = readings(profile, "Throughput"), readings(profile, "Time of a step")
    memory, line = readings(profile, "Peak memory"), profile.step_time.line
    timed = {p.micro_batch_size: p for p in profile.measured}
    assert list(rates) == [2**k for k in range(13)]
    for size, reading in rates.items():
        if size in timed:
            assert reading.value == timed[size].samples_per_second
            assert reading.interval == timed[size].samples_per_second_interval
            assert steps[size].interval == timed[size].step_time_interval_s
            assert (reading.basis, reading.extrapolated) == ("", False)
        elif size < 1024:
            assert reading.value == pytest.approx(size / profile.step_time.step_time_s(size))
            span = line.interval_at(size)
            ends = (size / span.high, size / span.low)
            assert (reading.interval.low, reading.interval.high) == pytest.approx(ends)
            assert steps[size][:2] == (line(size), span)
        if size not in profile.memory_bytes and size != 1024:
            assert memory[size].value == profile.predict_memory_bytes(size)
            assert memory[size].interval == profile.memory_fit.interval_at(size)
    assert {size: memory[size].value for size in profile.memory_bytes} == profile.memory_bytes
    assert what_if(profile).sizes[what_if(profile).start] == profile.choice.micro_batch_size


def test_beyond_what_was_measured_it_says_extrapolated():
    rates, memory = (readings(training_profile(), of) for of in ("Throughput", "Peak memory"))
    beyond = [
        [size for size, reading in found.items() if reading.extrapolated]
        for found in (rates, memory)
    ]
    # No size above one that ran out of memory has a speed.
    assert beyond == [[512], [512, 2048, 4096]]
    assert rates[2048][:3] == (None, None, "not measured: 1,024 ran out of memory")
    assert rates[512].basis == "extrapolated beyond the measured sizes, 1 to 256"
    assert rates[128].basis == "from the fit, between measured sizes"
    assert rates[1024][:3] == (None, None, "ran out of memory")


def test_a_fit_that_does_not_hold_has_no_values():
    off = {1: 1.0, 4: 1.3, 16: 0.8, 64: 1.4, 256: 1.0}
    bent = [point(size, (2e-3 + 1e-4 * size) * factor) for size, factor in off.items()]
    assert training_profile(points=tuple(bent)).step_time.holds is False
    assert what_if(training_profile(points=tuple(bent))) is None


def test_two_sizes_are_no_evidence_beyond_them():
    two = tuple(point(size, 2e-3 + 1e-4 * size) for size in (4, 16))
    rates = readings(training_profile(points=two), "Throughput")
    assert list(rates) == [4, 8, 16]
    assert rates[8].basis == "from the fit, between measured sizes"


def test_an_inference_profile_has_the_values_of_its_first_path():
    profile = inference_factory.make_profile()
    times, tails = readings(profile, "Time of a batch"), readings(profile, "p95 latency, at most")
    for timing in profile.answering:
        size = timing.batch_size
        assert times[size][:2] == (timing.batch_time_s, timing.batch_time_interval_s)
        assert tails[size].value == timing.latency_bound(0.95).value
    line = profile.latency.line
    assert times[256][:2] == (line(256), line.interval_at(256))
    assert times[256].extrapolated and tails[256].value is None
    memory = readings(profile, "Peak memory")[256]
    assert memory.value == profile.predict_memory_bytes(256)
    assert memory.basis.endswith("1 to 64; more than the limit of 64.0 MiB")


def test_a_largest_batch_has_its_memory_and_says_what_is_above_the_limit():
    result = max_batch_result()
    memory = readings(result, "Peak memory")
    assert {b: memory[b].value for b in result.memory_bytes} == result.memory_bytes
    assert memory[512][:2] == (result.predict(512), result.fit.interval_at(512))
    assert memory[4000][:3] == (None, None, "ran out of memory")
    assert memory[8192].value == result.predict(8192)
    assert memory[8192].basis.endswith("1 to 2,600; more than the limit of 8.00 GiB")


def test_a_recommendation_has_the_estimates_of_its_answer():
    found = make_recommendation(checks=())
    names = {
        "Time to the target": "seconds",
        "Updates to the target": "updates",
        "Throughput": "samples_per_second",
    }
    for name, field in names.items():
        for row in found.decision.sizes:
            estimate = getattr(row, field)
            reading = readings(found, name)[row.batch_size]
            assert reading[:2] == (estimate.value, estimate.interval)
    seconds = readings(found, "Time to the target")
    assert seconds[32].basis == ""
    assert seconds[64].extrapolated
    assert seconds[64].basis == ("extrapolated beyond the trained sizes, 32 to 32; not trained")
    assert what_if(found).sizes[what_if(found).start] == found.batch_size


def test_a_size_that_was_cut_short_has_no_time_to_the_target():
    found = make_recommendation()
    row = found.decision.sizes[2]
    short = dataclasses.replace(row, ended_by="cut short")
    sizes = tuple(short if one is row else one for one in found.decision.sizes)
    changed = make_recommendation(decision=dataclasses.replace(found.decision, sizes=sizes))
    reading = readings(changed, "Time to the target")[row.batch_size]
    assert reading[:3] == (None, None, "training was cut short before the target")
    assert readings(changed, "Throughput")[row.batch_size].value is not None


def test_a_batch_needs_the_memory_of_its_micro_batch():
    memory = make_memory()
    line = {size: 2**30 + 3 * 2**30 * size // 1437 for size in (8, 64)}
    probes = (*memory.probes, *(ProbeRecord(b, m, "fits", 1.0) for b, m in line.items()))
    memory = dataclasses.replace(memory, probes=probes)
    found = make_recommendation(memory=memory, timings=make_timings(fits=64))
    assert any(row.micro_batch_size < row.batch_size for row in found.decision.sizes)
    peaks = readings(found, "Peak memory of its micro-batch")
    for row in found.decision.sizes:
        micro = row.micro_batch_size
        expected = memory.memory_bytes.get(micro) or memory.fit.predict(micro)
        assert peaks[row.batch_size].value == expected


def test_a_study_has_its_goodput_and_its_cost_to_the_target():
    study = learned_study(3)
    goodputs = readings(study, "Goodput")
    for found in goodput_info(study).points:
        reading = goodputs[found.batch_size]
        assert reading.value == found.goodput.value
        # An example of the smallest size counts as one, whatever the noise scale.
        bar = None if found.batch_size == 16 else found.goodput.bar
        assert bar == (reading.interval and (reading.interval.low, reading.interval.high))
    assert goodputs[4096][:3] == (None, None, "out of memory")
    study = study_of_a_target()
    info = time_to_target_info(study)
    updates = readings(study, "Updates to validation accuracy ≥ 0.9")
    seconds = readings(study, "Training time to validation accuracy ≥ 0.9")
    for found in info.met:
        assert updates[found.batch_size].value == found.updates.value
        assert seconds[found.batch_size].value == found.seconds.value
    assert seconds[2048].value is None and seconds[2048].basis.startswith("not met in ")
    beyond = [size for size, reading in updates.items() if reading.extrapolated]
    assert beyond == [8192, 16384]
    for size in beyond:
        assert updates[size].value == info.fit.steps(size)
        assert updates[size].interval == info.fit.line.interval_at(1 / size)


def test_of_many_sizes_some_are_shown():
    """None of them is a power of two, so the fit alone has values there."""
    study = target_study(1, sizes=tuple(range(20, 920, 20)), missed=())
    found = what_if(study)
    assert len(found.sizes) < 45
    for quantity in found.quantities:
        measured = [one for one in quantity.readings if not one.basis]
        assert len(measured) > 20
    assert "what-if" in page_of(study)


@pytest.mark.parametrize(
    "record",
    [
        make_study,
        input_profile_factory.make_profile,
        lambda: training_profile(points=(point(8, 1e-3), left_out(16))),
        lambda: make_recommendation(pilot=None),
    ],
)
def test_a_record_without_a_fit_has_none(record):
    assert what_if(record()) is None
    assert "what-if" not in page_of(record())


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_holds_every_value_and_computes_none(name):
    found = what_if(RECORDS[name]())
    page = page_of(RECORDS[name]())
    (shown,) = positions(page)
    assert [one["size"] for one in shown] == [f"{size:,}" for size in found.sizes]
    for index, one in enumerate(shown):
        texts = [quantity.texts(index) for quantity in found.quantities]
        assert [tuple(each) for each in one["texts"]] == texts
        for (value, between, basis), quantity in zip(texts, found.quantities, strict=True):
            reading = quantity.readings[index]
            assert (value == "n/a") == (reading.value is None)
            assert bool(between) == (reading.interval is not None)
            assert ("extrapolated" in basis) == reading.extrapolated
            assert basis or reading.value is not None
        assert len(one["at"]) == len(found.quantities)
        assert all(0 <= x <= 240 and (y is None or 0 <= y <= 72) for x, y in one["at"])
    for at in zip(*(one["at"] for one in shown), strict=True):
        assert [x for x, _ in at] == sorted({x for x, _ in at})


def test_the_intervals_are_written_with_one_unit():
    found = what_if(training_profile())
    _, between, _ = found.quantities[0].texts(0)
    assert re.fullmatch(r"[\d.,]+ to [\d.,]+ samples/s", between)


def test_a_hostile_text_stays_text():
    hostile = "</script><script>alert('x')</script>\"'><b>"
    study = study_of_a_target()
    trials = []
    for trial in study.trials:
        runs = []
        for run in trial.executions:
            target = run.target and dataclasses.replace(run.target, metric=hostile)
            epochs = tuple(
                dataclasses.replace(e, metrics=e.metrics | {hostile: e.metrics["val_accuracy"]})
                for e in run.epochs
            )
            runs.append(dataclasses.replace(run, target=target, epochs=epochs))
        trials.append(dataclasses.replace(trial, executions=tuple(runs)))
    study = make_study(*trials)
    for page in (page_of(study), study._repr_html_()):
        (shown,) = positions(page)
        assert hostile.replace("_", " ") in shown[0]["words"]
        assert "<b>" not in page and "alert('x')</script" not in page
        assert page.count("</script>") == 1


def test_several_on_one_page_do_not_collide():
    records = [make() for make in RECORDS.values()]
    page = page_of(*records)
    assert len(positions(page)) == len(records)
    assert page.count("</script>") == 1
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    displays = "".join(record._repr_html_() for record in records)
    assert len(positions(displays)) == len(records)
    assert " id=" not in displays
    scripts = re.findall(r"<script>.*?</script>", displays, re.DOTALL)
    # Each takes the sliders that no earlier one has, and leaves no name behind.
    assert len(set(scripts)) == 1 and ":not([data-live])" in scripts[0]
    assert re.findall(r"^(?:const|let|var|function)", scripts[0], re.MULTILINE) == []


@pytest.mark.parametrize("name", RECORDS)
def test_it_asks_no_network(name):
    for page in (page_of(RECORDS[name]()), RECORDS[name]()._repr_html_()):
        assert re.findall(r"https?:|//[a-z]|fetch\(|url\((?!#)|\ssrc=", page) == []


def test_the_slider_is_labelled_and_a_table_stands_without_the_script():
    page = training_profile()._repr_html_()
    found = what_if(training_profile())
    ends = f'max="{len(found.sizes) - 1}" value="{found.start}"'
    assert f'{ends} aria-label="Micro-batch size"' in page
    assert '<div class="controls" hidden>' in page
    table = page[page.index("<details open>") : page.index("</details>")]
    assert table.count("<tr>") == 1 + len(found.sizes)
    assert "extrapolated beyond the measured sizes, 1 to 256" in table
    words = positions(page)[0][found.start]["words"]
    assert words.startswith(f"{found.sizes[found.start]:,}. Throughput: ")


def test_a_wide_range_is_logarithmic_and_a_narrow_one_starts_at_zero():
    found = what_if(training_profile())
    rates, steps, _ = found.quantities
    marks = {size: mark.y for size, mark in zip(found.sizes, steps.marks, strict=True)}
    assert marks[64] > marks[256] > marks[512]
    assert (rates.span, steps.span) == ("0 to 9,600 samples/s", "0 to 53.4 ms")
