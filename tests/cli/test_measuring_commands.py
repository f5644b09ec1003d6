"""The commands that measure, run in this process."""

import keras
import pytest
from fake_clock import FakeClock
from figure_studies import max_batch_result
from small_models import mlp

import kbatch
from kbatch.cli import main as cli


@pytest.mark.parametrize(
    ("data", "more", "batch_size"),
    [("data", (), 8), ("sized", ("--batch-size", "10", "--no-remedies", "-o", "elsewhere"), 10)],
)
def test_input_writes_record_and_figure(folder, capsys, data, more, batch_size):
    words = ["input", "given:build", "--data", f"given:{data}", "--budget", "0.3"]
    assert cli.main([*words, *more]) == 0
    out = capsys.readouterr().out
    directory = folder / ("elsewhere" if "-o" in more else "kbatch-input")
    profile = kbatch.InputPipelineProfile.load(directory / "input.json")
    assert profile.batch_size == batch_size
    assert f"\n{profile.verdict.capitalize()}: " in out
    assert "train step alone" in out
    assert "/input.png" in out
    assert (directory / "input.png").stat().st_size > 10_000
    assert bool(profile.changes) is (data == "data")


def test_max_batch_passes_options_and_writes_the_result(folder, capsys, monkeypatch):
    passed = {}

    def fake_search(build, x, y, **arguments):
        passed.update(arguments, policy=keras.config.dtype_policy().name, shape=x.shape)
        return max_batch_result()

    monkeypatch.setattr("kbatch.memory.find.find_max_batch_size", fake_search)
    monkeypatch.setenv("COLUMNS", "200")  # No text is folded.
    words = ["max-batch", "given:build", "--data", "given:arrays"]
    words += ["--limit", "32MiB", "--window", "0.5", "0.6", "--max", "20", "--inference"]
    assert cli.main([*words, "--policy", "mixed_bfloat16", "-o", "found.json"]) == 0
    assert passed == {
        "memory_window": (0.5, 0.6),
        "memory_limit_bytes": 32 * 2**20,
        "max_batch_size": 20,
        "training": False,
        "policy": "mixed_bfloat16",
        "shape": (200, 8),
    }
    assert kbatch.MaxBatchSizeResult.load(folder / "found.json") == max_batch_result()
    printed = capsys.readouterr().out
    answer = max_batch_result().max_batch_size
    assert f"Largest batch for training: {answer:,} examples" in printed
    assert printed.count("fresh process") == 1
    assert printed.endswith("result: found.json\n")


@pytest.mark.slow
def test_inference_writes_profile_table_and_figures(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    mlp().save("net.keras")
    words = ("--slo", "10s", "--paths", "compiled, predict", "--batch-sizes", "1,64")
    assert cli.main(["inference", "net.keras", *words, "--seconds", "5"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "\x1b" not in out
    for words in ("Batch size 64", "within 10000 ms", "verified", "samples/s"):
        assert words in out, words
    folder = tmp_path / "kbatch-inference"
    figures = {f"inference-{name}.png" for name in ("throughput", "operating-curve", "memory")}
    assert {file.name for file in folder.iterdir()} == {"profile.json", "profile.csv", *figures}
    profile = kbatch.InferenceProfile.load(folder / "profile.json")
    assert profile.series == (("compiled", "float32"), ("predict", "float32"))


@pytest.mark.slow
def test_recommend_writes_record_and_figure(folder, capsys, monkeypatch):
    # A fake clock, so that a slow start of a process does not use up the budget.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=0.01))
    words = ["recommend", "given:build", "--data", "given:arrays", "--budget", "20", "--seed", "0"]
    words += ["--base-batch-size", "16", "--limit", "1GiB"]
    assert cli.main([*words, "-o", "found.json", "--figure", "limits.PNG"]) == 0
    printed = capsys.readouterr().out
    recommendation = kbatch.Recommendation.load(folder / "found.json")
    assert (recommendation.base_batch_size, recommendation.pilot.seed) == (16, 0)
    assert recommendation.memory_limit_bytes == 2**30
    assert str(recommendation) in printed
    assert "measuring gradient noise" in printed
    assert printed.endswith("result: found.json\nfigure: limits.PNG\n")
    assert (folder / "limits.PNG").stat().st_size > 10_000
