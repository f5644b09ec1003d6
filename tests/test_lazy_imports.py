import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kbatch

START = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
folder = Path(sys.argv[1])

def check(*heavy):
    imported = sorted({name.split(".")[0] for name in sys.modules} & {*heavy})
    if imported:
        sys.exit(f"imported: {imported}")

def called(*words):
    from kbatch.cli.main import main
    try:
        assert main([*map(str, words)]) == 0
    except SystemExit as ended:
        assert not ended.code
"""
HOST = '"tensorflow", "keras", "keras_tuner"'
DRAWING = '"numpy", "pandas", "matplotlib", "jinja2", "rich"'
STUDY = "import kbatch; from records_factory import make_study; study = make_study()"
PROFILE = "from inference_factory import make_profile; profile = make_profile()"
# Steps of a process, each with the packages that must not be imported by then.
PROCESSES = {
    "figures": [
        ("import kbatch; dir(kbatch)", f"{HOST}, {DRAWING}"),
        ("called('--help')", f"{HOST}, {DRAWING}"),
        ("called('plot', '--help')", f"{HOST}, {DRAWING}"),
        ("kbatch.powers_of_two(1, 8); kbatch.scale_learning_rate", HOST),
        (
            f"import kbatch; {PROFILE}; path = folder / 'p.json'; profile.save(path);"
            "profile.batch_for(latency_ms=5); profile.knee",
            f'{HOST}, "pandas", "matplotlib"',
        ),
        (
            f"{STUDY}; study.save(folder / 's.json');"
            "called('plot', folder / 's.json', '--figure', 'pareto', '-o', folder / 'p.svg')",
            f'{HOST}, "pandas", "rich"',
        ),
        ("kbatch.plot_trials(study)", f'{HOST}, "pandas"'),
        ("kbatch.plot_inference_throughput(profile)", f'{HOST}, "pandas"'),
        ("kbatch.InferenceProfile.load(path)", HOST),
        ("called('report', path, '-o', folder / 'r.html')", HOST),
    ],
    "study": [
        (
            f"{STUDY}; study.save(folder / 's.json');"
            "kbatch.load_study(folder / 's.json').to_dataframe()",
            f'{HOST}, "matplotlib", "jinja2"',
        ),
        ("kbatch.write_report(study, folder / 'r.html')", HOST),
    ],
}


def run(steps, folder):
    code = START + "\n".join(f"{work}\ncheck({heavy})" for work, heavy in steps)
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("steps", PROCESSES.values(), ids=PROCESSES)
def test_reading_and_plotting_do_not_import_heavy_packages(steps, tmp_path):
    done = run(steps, tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_check_detects_an_import(tmp_path):
    assert "imported: ['numpy']" in run([("import numpy", DRAWING)], tmp_path).stderr


def test_public_names_in_dir_and_unknown_name():
    assert set(kbatch.__all__) <= set(dir(kbatch))
    with pytest.raises(AttributeError, match="no attribute 'plot_trails'"):
        _ = kbatch.plot_trails


def test_public_names_equal_the_stub():
    stub = ast.parse(Path(kbatch.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    named = {
        alias.asname: f"{node.module}.{alias.name}" if node.module == "kbatch" else node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert named == kbatch._HOME_OF
    for name, home in named.items():
        module = importlib.import_module(home)
        assert getattr(kbatch, name) is getattr(module, name, module)
