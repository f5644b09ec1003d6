"""The floors of the design: a module imports from its own folder and from lower floors."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kbatch"
FLOORS = {
    "analysis": 0,
    "records": 1,
    "reporting": 2,
    "instruments": 3,
    "training": 4,
    "profiling": 5,
    "tuning": 6,
    "commands": 7,
    "cli": 7,
    "demo": 7,
    "__main__": 7,
}
# What each floor adds to the floors below it.
ADDED = [
    {"numpy"},
    {"pandas"},
    {"matplotlib", "mpl_toolkits", "jinja2", "markupsafe"},
    {"tensorflow", "pynvml", "psutil", "cloudpickle"},
    {"keras"},
    # A build function may take keras-tuner's `hp` in every experiment.
    {"rich", "keras_tuner"},
    set(),
    {"sklearn"},
]
# What a module looks up by name when it runs, upwards: a notebook or `print` asks a record how it
# looks.
DOORS = {
    ("kbatch.records.shown_record", "kbatch.reporting.notebook_html"),
    ("kbatch.records.recommendation", "kbatch.reporting.recommendation_text"),
}
# Drawing belongs to reporting alone, whatever stands above it.
ONLY_IN = {"jinja2": "reporting", "markupsafe": "reporting", "mpl_toolkits": "reporting"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(tree, module):
    """Every imported name with its line, relative ones made absolute, in functions as well."""
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                kept = package[: len(package) - node.level + 1]
                origin = ".".join([*kept, *([node.module] if node.module else [])])
            if origin == "kbatch":
                yield from ((f"kbatch.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield origin, node.lineno


def named(tree):
    """Texts that are dotted names of modules of the package, as `import_module` takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if parts[0] == "kbatch" and len(parts) > 1 and parts[1] in FLOORS:
                yield node.value, node.lineno


def violations(source, module):
    """Says which imports a module of this dotted name may not have."""
    place = module.split(".")[1]
    if place not in FLOORS:
        return [f"{module}: {place!r} is on no floor"]
    found = []
    tree = ast.parse(source)
    doors = ((name, line) for name, line in named(tree) if (module, name) not in DOORS)
    for name, line in (*imported(tree, module), *doors):
        top, *rest = name.split(".")
        if top == "kbatch":
            target = rest[0] if rest else ""
            # The version is the package's own and on every floor.
            allowed = target == "__version__" or target == place
            allowed = allowed or FLOORS.get(target, 99) < FLOORS[place]
            # The top floor's modules lie in one folder, the package's own.
            allowed = allowed or FLOORS.get(target) == FLOORS[place] == 7
        else:
            below = set().union(*ADDED[: FLOORS[place] + 1])
            allowed = top in sys.stdlib_module_names or top in below
            allowed = allowed and ONLY_IN.get(top, place) == place
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_and_lower_floors(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    assert violations(path.read_text(encoding="utf-8"), ".".join(parts)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kbatch.analysis.x", "import pandas"),
        ("kbatch.analysis.x", "def f():\n    import tensorflow as tf"),
        ("kbatch.analysis.x", "from kbatch.records import study"),
        ("kbatch.records.x", "from kbatch import reporting"),
        ("kbatch.records.x", "from kbatch.reporting.report import write_report"),
        ("kbatch.records.x", "from ..reporting import report"),
        ("kbatch.records.x", "import matplotlib.pyplot"),
        ("kbatch.reporting.x", "import keras"),
        ("kbatch.reporting.figures.x", "from ...tuning import hypermodel"),
        ("kbatch.training.x", "import keras_tuner"),
        ("kbatch.tuning.x", "import jinja2"),
        ("kbatch.tuning.x", "import kbatch"),
        (
            "kbatch.records.x",
            "import importlib\nimportlib.import_module('kbatch.reporting.report')",
        ),
        ("kbatch.cli", "import requests"),
        ("kbatch.helpers.x", ""),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kbatch.analysis.x", "import math\nimport numpy as np\nfrom . import intervals"),
        (
            "kbatch.records.x",
            "from kbatch.analysis import Interval\nfrom kbatch import __version__",
        ),
        ("kbatch.reporting.figures.x", "from ..conditions import caption\nimport matplotlib"),
        ("kbatch.tuning.x", "import keras_tuner, keras, rich\nfrom kbatch.training import x"),
        ("kbatch.cli", "from kbatch import demo\nfrom kbatch.tuning import hypermodel"),
        ("kbatch.demo", "import sklearn.datasets"),
        ("kbatch.tuning.x", "PROGRAM = 'kbatch.instruments.worker_process'"),
        ("kbatch.records.shown_record", "WRITER = 'kbatch.reporting.notebook_html'"),
    ],
)
def test_a_right_import_is_allowed(module, source):
    assert violations(source, module) == []
