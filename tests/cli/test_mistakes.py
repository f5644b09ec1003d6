"""Mistakes in command lines: one line says what to give, without a traceback or files."""

import re
import subprocess
import sys

import pytest
from figure_studies import learned_study
from inference_factory import make_profile
from records_factory import make_environment, make_trial

from kbatch.cli import main as cli
from kbatch.records.json_codec import write_record
from kbatch.records.training_run import SearchRecord

INPUT = "input given:build --data given:data --budget 0.3"
RECOMMEND = "recommend given:build --data given:arrays --budget 2"
MISTAKES = {
    "demo --batch-sizes 16,big": "integers with commas",
    "demo --batch-sizes 16,16": r"--batch-sizes: it must be ascending",
    "demo --quick --policy float12": "`--policy` must be.*mixed_float16",
    "demo --output file/below": r"Not a directory: '?file/below",
    "demo --quick --output mine": "no results of a demo",
    "report nowhere": "no kbatch study in nowhere",
    "report empty": r"tuner\.search",
    "report nothing.json": r"nothing\.json",
    "report text.json": r"is damaged, or kbatch did not write it\.$",
    "report good.json text.json": "is damaged, or kbatch did not write it",
    "report trial.json": "of type TrialRecord",
    "report good.json -o report.pdf": r"`--output` must end in `\.html` \(one file\) or `\.md`",
    "export empty -o trials.csv": r"tuner\.search",
    "export good.json -o trials.xlsx": r"\.csv or \.json",
    "plot good.json --figure trails": r"trials'?, '?learning-rates",
    "plot good.json --figure time-to-target": "--target 0.95",
    "plot good.json --figure gpu-timeline": "NVIDIA GPU",
    "plot good.json profile.json": "alone, without `--figure`.*InferenceProfile",
    "plot good.json --figure memory": "MaxBatchSizeResult",
    "plot good.json --figure pareto --target 0.5": r"pareto --target 0\.5",
    **{
        f"plot good.json --width={width}": "width must be between 3.25 and 40 inches"
        for width in ("0", "-3", "nan", "1e9")
    },
    "inference text.json": "The model must be a .keras, .h5, .onnx or",
    "inference missing.keras": "does not exist",
    "inference missing.keras --slo 20": "such as 20ms",
    "inference missing.keras --batch-sizes 1,x": "integers with commas",
    INPUT.replace(":build", ":missing"): "has no function missing",
    INPUT.replace(":data", ":missing"): "has no function missing",
    INPUT.replace(":build", ":number"): "returns a compiled model.*number, a int",
    INPUT.replace(":build", ":forgetful"): "with `return model`",
    INPUT.replace(":build", ":uncompiled"): "must be compiled",
    INPUT.replace(":data", ":stream"): "more than once.*a generator",
    INPUT.replace(":data", ":sized"): "give `--batch-size`",
    INPUT.replace(":data", ":number"): r"Give .*builtins\.int",
    INPUT + " --budget -1": "`--budget` must.*--budget -1",
    INPUT + " --cache-bytes -1": "--cache-bytes -1",
    INPUT + " --batch-size 0": "`--batch-size`.*--batch-size 0",
    RECOMMEND.replace(":build", ":missing"): "has no function missing",
    RECOMMEND.replace(":arrays", ":stream"): "Give arrays",
    RECOMMEND + " --figure limits.gif": r"`--figure` must end in \.png, \.svg or \.pdf",
    RECOMMEND + " --base-batch-size 0": "`--base-batch-size` must be a positive",
    RECOMMEND + " --limit much": "--limit: it must be a number with a unit",
    "demo --fast": "unrecognized arguments: --fast.*kbatch --help",
}


@pytest.fixture
def files(folder):
    """Make files and folders for the mistakes."""
    learned_study().save(folder / "good.json")
    make_profile().save(folder / "profile.json")
    (folder / "text.json").write_text("[1, 2]")
    write_record(make_trial(16), folder / "trial.json")
    write_record(SearchRecord({}, make_environment()), folder / "empty" / "kbatch.json")
    (folder / "file").touch()
    (folder / "mine" / "demo-search").mkdir(parents=True)
    return folder


def written(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_prints_one_line_and_writes_no_file(words, files, capsys):
    before = written(files)
    assert cli.main(words.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kbatch: ")
    assert re.search(MISTAKES[words], line)
    assert written(files) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("uncompiled", r"kbatch: `model` must be compiled: call `model\.compile\("),
        ("broken", r"kbatch: the file is not there\n(.|\n)*in broken"),  # With a traceback.
    ],
)
def test_max_batch_build_function_that_fails(folder, capsys, build, words):
    assert cli.main(["max-batch", f"given:{build}", "--data", "given:arrays"]) == 1
    assert re.match(words, capsys.readouterr().err)


def test_wrong_names_are_refused_before_tensorflow_starts(folder):
    wrong = {
        "build --data given:data": "MODULE:BUILD.*package.module:function.*build",
        "given:build --data data": "--data.*package.module:function.*data",
        "no_such_module:build --data given:data": "has no module.*no_such_module:build",
    }
    code = f"""
import sys
from kbatch.cli import main as cli
for command in ("input", "max-batch"):
    for names in {list(wrong)!r}:
        assert cli.main([command, *names.split()]) == 1
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for line, words in zip(lines, [*wrong.values()] * 2, strict=True):
        assert re.search(words, line)


def test_export_to_a_full_disk(files):
    words = [sys.executable, "-m", "kbatch", "export", "good.json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr == "kbatch: [Errno 28] No space left on device\n"
