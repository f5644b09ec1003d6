import types

import gpu_page

ENVIRONMENT = {
    "devices": ["GPU:0 NVIDIA H100 80GB HBM3"],
    "versions": {"tensorflow": "2.21.0", "nvidia-driver": "550.54.15"},
    "platform": "Linux",
    "created_at": "2026-11-22T10:00:00+00:00",
}


def report(outcome="passed", seconds=1.0, facts=(), longrepr=None):
    properties = [*facts, ("seconds", seconds)]
    return types.SimpleNamespace(outcome=outcome, user_properties=properties, longrepr=longrepr)


def test_the_page_holds_versions_outcomes_and_what_was_measured():
    passed = gpu_page.Check("tests/gpu/test_a.py::test_the_batch_fits[whole card]")
    passed.add(report())
    passed.add(report(seconds=4.6, facts=[("largest batch", 128), ("sizes", [8, 4])]))
    failed = gpu_page.Check("tests/gpu/test_a.py::test_it_ends")
    failed.add(report("failed", longrepr="lines\nits process ended: Check failed: a | b < c\n\n"))
    skipped = gpu_page.Check("tests/gpu/test_a.py::test_smi")
    skipped.add(report("skipped", 0.0, longrepr=("file", 1, "Skipped: no nvidia-smi")))
    text = gpu_page.page([passed, failed, skipped], ENVIRONMENT, 61.0)
    assert gpu_page.file_name(ENVIRONMENT) == "nvidia-h100-80gb-hbm3-tensorflow-2.21.0"
    assert "2026-11-22: 1 passed, 1 failed, 1 skipped, in 61 s." in text
    assert "| nvidia-driver | 550.54.15 |" in text
    assert "| the batch fits (whole card) | passed | 5 | largest batch: 128; sizes: 8, 4 |" in text
    assert r"| it ends | failed | 1 | its process ended: Check failed: a \| b &lt; c |" in text
    assert "| smi | skipped | 0 | Skipped: no nvidia-smi |" in text
