import re

import pytest

from kbatch.device.doctor import (
    cpu_finding,
    memory_finding,
    read_host_findings,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("available", "group", "status", "text"),
    [
        (12, None, "ok", "16.0 GiB, 12.0 GiB free"),
        (12, 32, "ok", "16.0 GiB, 12.0 GiB free"),
        (12, 4, "ok", "16.0 GiB, 12.0 GiB free; the control group allows 4.00 GiB"),
        (0.5, None, "warning", "free: a second process with TensorFlow needs 1 GiB"),
        (12, 0.5, "warning", "allows 0.500 GiB: a second process with TensorFlow needs 1 GiB"),
    ],
)
def test_memory_is_told_with_what_narrows_it(available, group, status, text):
    group = None if group is None else int(group * GIB)
    finding = memory_finding(16 * GIB, int(available * GIB), group)
    assert finding.status == status
    assert finding.text.endswith(text)


@pytest.mark.parametrize(
    ("cores", "quota", "load", "status", "text"),
    [
        (1, None, 0.2, "ok", "1 core, load 0.2"),
        (8, None, 4.0, "ok", "8 cores, load 4.0"),
        (8, None, 4.1, "warning", "other work disturbs timings"),
        (8, 1.5, 0.5, "ok", "8 cores, of whose time the control group allows 1.5, load 0.5"),
        (8, 1.5, 1.0, "warning", "disturbs"),
        (8, 16.0, 1.0, "ok", "8 cores, load 1.0"),
    ],
)
def test_processors_are_told_with_what_keeps_them_busy(cores, quota, load, status, text):
    finding = cpu_finding(cores, quota, load)
    assert finding.status == status
    assert text in finding.text


def test_variables_that_change_results_are_named():
    assert "none" in read_host_findings(2, variables={"HOME": "x"})[-1].text
    variables = {"HOME": "x", "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    text = read_host_findings(2, variables=variables)[-1].text
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in text
    assert "HOME" not in text


def test_this_host_is_read():
    findings = read_host_findings(2, variables={})
    assert [finding.topic for finding in findings] == ["memory", "CPU", "variables"]
    total, free = re.match(r"([\d.,]+) GiB, ([\d.,]+) GiB free", findings[0].text).groups()
    assert 0 < float(free.replace(",", "")) <= float(total.replace(",", ""))
