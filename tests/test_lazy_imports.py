import subprocess
import sys

import pytest

import kbatch

WORK = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
{work}
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & {{{heavy}}})
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
HOST = '"tensorflow", "keras", "keras_tuner"'
DRAWING = '"numpy", "pandas", "matplotlib", "jinja2", "rich"'
PROFILE = (
    "import kbatch; from inference_factory import make_profile; profile = make_profile();"
    "path = Path(sys.argv[1]) / 'p.json'; profile.save(path);"
    "profile = kbatch.InferenceProfile.load(path); profile.batch_for(latency_ms=5);"
)
STUDY = "import kbatch; from records_factory import make_study; study = make_study();"


def run(work, heavy, folder):
    code = WORK.format(work=work, heavy=heavy)
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("work", "heavy"),
    [
        ("import kbatch; dir(kbatch)", f"{HOST}, {DRAWING}"),
        (
            f"{STUDY} path = Path(sys.argv[1]) / 's.json'; study.save(path);"
            "kbatch.load_study(path).to_dataframe()",
            f'{HOST}, "matplotlib", "jinja2"',
        ),
        (f"{STUDY} kbatch.plot_trials(study)", f'{HOST}, "pandas"'),
        (
            f"{STUDY} study.save(sys.argv[1] + '/s.json'); from kbatch.cli import main as cli;"
            "assert cli.main(['plot', sys.argv[1] + '/s.json', '--figure', 'pareto', '-o',"
            "sys.argv[1] + '/p.svg']) == 0",
            f'{HOST}, "pandas", "rich"',
        ),
        (
            "from kbatch.cli import main as cli\ntry:\n    cli.main(['plot', '--help'])\n"
            "except SystemExit: pass",
            f"{HOST}, {DRAWING}",
        ),
        (f"{STUDY} kbatch.write_report(study, sys.argv[1] + '/r.html')", HOST),
        (f"{PROFILE} profile.knee", f'{HOST}, "pandas", "matplotlib"'),
        (f"{PROFILE} kbatch.plot_inference_throughput(profile)", f'{HOST}, "pandas"'),
        (f"{STUDY} kbatch.write_report(study, sys.argv[1] + '/r.md')", HOST),
        (
            f"{PROFILE} from kbatch.cli.main import main; assert main(['report', str(path), '-o',"
            " sys.argv[1] + '/r.html']) == 0",
            f'{HOST}, "pandas"',
        ),
        (
            "from kbatch.cli.main import main\ntry:\n    main(['--help'])\n"
            "except SystemExit:\n    pass",
            f"{HOST}, {DRAWING}",
        ),
        ("import kbatch; kbatch.powers_of_two(1, 8); kbatch.scale_learning_rate", HOST),
    ],
)
def test_what_reads_and_tells_never_starts_tensorflow(work, heavy, tmp_path):
    done = run(work, heavy, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_check_sees_an_import(tmp_path):
    assert "imported: ['numpy']" in run("import numpy", DRAWING, tmp_path).stderr


def test_every_public_name_is_listed_and_an_unknown_one_refused():
    assert set(kbatch.__all__) <= set(dir(kbatch))
    with pytest.raises(AttributeError, match="no attribute 'plot_trails'"):
        _ = kbatch.plot_trails
