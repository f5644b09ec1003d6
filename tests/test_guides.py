"""The code of README and guides: its names and commands exist, and it runs."""

import ast
import inspect
import re
import subprocess

import pytest
from code_blocks import READER, ROOT, blocks, kbatch_commands, run_python
from shared_worker import shared_worker

import kbatch
from kbatch.cli.main import command_parser, load_result

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md", DOCS / "gallery.md", *sorted(DOCS.glob("*/*.md"))]
GUIDES = sorted((DOCS / "guides").glob("*.md"))


@pytest.fixture(scope="module", autouse=True)
def one_process_and_two_sizes():
    """By default, a search would try more sizes than a test waits for."""
    with shared_worker(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbatch.search.tuner_arguments.LARGEST", 32)
        yield


def name(path):
    return str(path.relative_to(ROOT))


def kbatch_calls(tree):
    """Lists the calls `kbatch.function(...)`, as pairs of the name and the call."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kbatch"), attr=attribute)):
                yield attribute, node


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_guide_calls_have_valid_arguments(page):
    for block in blocks(page, "python"):
        for attribute, call in kbatch_calls(ast.parse(block)):
            signature = inspect.signature(getattr(kbatch, attribute))
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            signature.bind(*call.args, **keywords)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_guide_commands_are_valid(page, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for words in kbatch_commands(page):
        if not words[-1].isupper():
            command_parser().parse_args(words)


def test_no_file_installs_kbatch_from_pypi():
    """`kbatch` on PyPI is a stranger's; what is missing is installed by its own name."""
    stranger = re.compile(rb"kbatch\[|pip install (-\S+ )*['\"]?kbatch(?!-tuner)")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / path for path in files.stdout.decode().split("\0") if path]
    assert not [path for path in paths if path.is_file() and stranger.search(path.read_bytes())]


def test_readme_names_the_first_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`make demo` installs" in text and "`make test` runs the tests" in text


def test_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"\.\. auto\w+:: (?:kbatch\.)?(\w+)$", text, re.MULTILINE))
    assert set(kbatch.__all__) <= listed, "add them to docs/reference"


def test_guides_name_every_public_name():
    text = "\n".join(page.read_text() for page in GUIDES)
    absent = [one for one in kbatch.__all__ if not re.search(rf"\b{one}\b", text)]
    assert absent == [], "say in a guide what it is for"


def test_guides_quote_the_output_for_their_records():
    results = map(load_result, (DOCS / "data").glob("[!n]*.json"))  # Not numbers.json.
    pages = [str(one.decide() if isinstance(one, kbatch.Study) else one) for one in results]
    printed = {line for page in pages for line in page.splitlines()}
    quoted = "".join("".join(blocks(guide, "(?:text|output)")) for guide in GUIDES).splitlines()
    assert {*quoted} - printed == set()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder in which the quickstart ran, its names, and the blocks that ran."""
    folder = tmp_path_factory.mktemp("guides")
    names, ran = {}, set()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_python(DOCS / "index.md", names, ran=ran)
    return folder, names, ran


@pytest.mark.slow
def test_the_quickstart_writes_a_figure_and_a_report(quickstart):
    folder, *_ = quickstart
    assert (folder / "trials.png").stat().st_size > 10_000
    assert (folder / "report.html").stat().st_size > 10_000
    trials = kbatch.load_study(folder / "results" / "search").trials  # Several rates of a size.
    assert {32} <= {trial.batch_size for trial in trials} <= {16, 32}


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=name)
def test_a_guide_runs(guide, quickstart, monkeypatch):
    folder, names, ran = quickstart
    monkeypatch.chdir(folder)
    run_python(guide, dict(names), ran=ran)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(READER, names)
    run_python(ROOT / "README.md", names)
    # A busy machine has time for one short run only; guesses are right in a tenth.
    assert names["decision"].best.metrics["val_accuracy"] > 0.4
    accuracy = names["model"].evaluate(names["x"], names["y"], verbose=0, return_dict=True)
    assert accuracy["accuracy"] > 0.4
