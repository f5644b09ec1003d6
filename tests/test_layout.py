"""The layout: the order of packages, what starts TensorFlow, and how much a reader must hold."""

import ast
import functools
import re
from pathlib import Path

import pytest

# The most that kbatch may have of what a reader pays for, lines behind a module with all that it
# imports. The numbers may only fall: lower one when yours is lower. If a feature is worth more,
# raise it in the same commit, and say in its message by how much and why.
LIMITS = {
    "lines of code in kbatch": 22_691,  # Without docstrings, comments and blank lines.
    "files in kbatch": 127,
    "record types": 79,
    "properties": 150,
    "underscore attributes of other objects": 0,
    "except Exception without a comment": 0,
    "lines of tests": 29_506,
    "kbatch.search.tuner": 20_670,  # BatchSizeTuner
    "kbatch.search.hypermodel": 14_744,  # HyperModel
    "kbatch.memory.find": 8_221,  # find_max_batch_size
    "kbatch.study.study": 5_840,  # load_study
    "kbatch.training.accumulation.accumulate": 3_861,  # accumulate_gradients
}
TO_DO = {
    "lines of code in kbatch": "delete or inline what the new code replaces",
    "files in kbatch": "add to the file that holds the idea already",
    "record types": "return a record that there is, or plain values",
    "properties": "make it a field, or compute it where it is used",
    "underscore attributes of other objects": (
        "give the attribute a public name, or pass its value in; private parts of libraries are "
        "read in kbatch/library_internals.py, with a test of each"
    ),
    "except Exception without a comment": (
        "catch the exception that you mean, or say in a comment beside it what may be raised and "
        "why any of it is fine"
    ),
    "lines of tests": "parametrise, or extend the test that holds the same law",
}
IMPORT_LESS = "import less: take what is needed from a lower module, or move it into one"

PACKAGE = Path(__file__).parent.parent / "kbatch"
# From the lowest on: a module imports from its own package and from those before it.
ORDER = (
    "errors",
    "library_internals",
    "analysis",
    "records",
    "plotting",
    "page",
    "progress",
    "device",
    "training",
    "timing",
    "memory",
    "throughput",
    "inference",
    "input_pipeline",
    "study",
    "search",
    "recommendation",
    "report",
    "cli",
    "__main__",
)
# What only some packages import, whatever stands above them.
ONLY_IN = {
    "jinja2": {"page"},
    "markupsafe": {"page"},
    "rich": {"progress", "search"},
    "mlxtend": {"cli"},
}
# Packages and files that may start TensorFlow when they are imported; all others are read, drawn
# and written without it. `...` is every file of a package.
TENSORFLOW = {"tensorflow", "keras", "keras_tuner"}
EXPERIMENTS = {
    "library_internals": ...,
    "device": {"failures", "memory"},
    "training": ...,
    "timing": ...,
    "memory": {"find", "probe", "workload"},
    "throughput": {"measure"},
    "inference": {"batch_dependence", "call_paths", "functions", "measure"},
    "input_pipeline": {"blocks", "changes", "measure"},
    "search": ...,
    "recommendation": {"measure"},
}
# An engine's worker imports it, and starts a process that trains.
BEFORE_TENSORFLOW = {"kbatch.search.executors"}
# What is behind another door, opened where a function is called: `Decision.apply` trains, a report
# is drawn when it is written, a result is rendered when it is shown, and a tracker is written to.
OTHER_DOORS = {
    ("kbatch.study.decision", "kbatch.training.build_function"),
    ("kbatch.study.decision", "kbatch.training.learning_rate"),
    ("kbatch.page.document", "kbatch.plotting.canvas"),
    ("kbatch.page.result", "kbatch.page.document"),
    ("kbatch.study.decision", "kbatch.page.document"),
    ("kbatch.study.study", "kbatch.study.trackers"),
}
# The table of names by which a result finds its figures, which are imported when they are drawn.
BY_NAME = "kbatch.page.result"


def dotted(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def nodes_in(module):
    return [*ast.walk(tree_of(module))]


def name_of(node):
    return node.id if isinstance(node, ast.Name) else None


@functools.cache
def imports_in(module):
    """List imported names with their lines, whether in functions, and whether for annotations."""
    waiting, found = [(node, False, False) for node in tree_of(module).body], []
    while waiting:
        node, later, checks = waiting.pop()
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, later, checks) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: import by the whole name, kbatch.x"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if node.module == "kbatch" or whole in MODULES else node.module
                found.append((name, node.lineno, later, checks))
        elif not isinstance(node, ast.expr):
            checks |= isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
            later |= checks or isinstance(node, ast.FunctionDef)
            waiting += [(child, later, checks) for child in ast.iter_child_nodes(node)]
    return found


def imported(module, *, at_once=False, annotations=True):
    """Every imported name with its line.

    Those in functions as well, or `at_once` those of a bare import alone; with those that only
    annotations need, or without.
    """
    for name, line, later, checks in imports_in(module):
        if not ((at_once and later) or (checks and not annotations)):
            yield name, line


def named(module):
    """Texts that are dotted names of modules of the package, as `import_module` takes them."""
    for node in nodes_in(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if parts[0] == "kbatch" and len(parts) > 1 and parts[1] in ORDER:
                yield node.value, node.lineno


def violations(module):
    """Say which imports a module of this dotted name may not have."""
    place = module.split(".")[1]
    if place not in ORDER:
        return [f"{module}: {place!r} has no place in the order"]
    found = []
    for name, line in (*imported(module), *(() if module == BY_NAME else named(module))):
        top, *rest = name.split(".")
        if top == "kbatch":
            target = rest[0] if rest else ""
            # The version is the package's own.
            allowed = target == "__version__" or (
                target in ORDER and ORDER.index(target) <= ORDER.index(place)
            )
        else:
            allowed = place in ONLY_IN.get(top, {place})
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


def test_modules_import_only_from_allowed_packages():
    modules = [name for name in MODULES if name != "kbatch"]
    faults = [fault for name in modules for fault in violations(name)]
    assert not faults, "move the code down in ORDER, or pass in what is needed from above"


@functools.cache
def imports_of(module, at_once=False, annotations=False):
    """Return what a module imports, and the packages around it where it is imported at once."""
    found = {name for name, _ in imported(module, at_once=at_once, annotations=annotations)}
    parts = module.split(".") if at_once else []
    return found | {".".join(parts[:i]) for i in range(1, len(parts))}


@functools.cache
def needed_by(module, but=frozenset(), at_once=False, annotations=False):
    """Return the modules of the package that a module imports, directly or not, and itself."""
    waiting, found = [module], set()
    while waiting:
        name = waiting.pop()
        if name in MODULES and name not in found:
            found.add(name)
            imports = imports_of(name, at_once, annotations)
            waiting += [each for each in imports if (name, each) not in but]
    return found


def starts_tensorflow(module):
    """Return whether TensorFlow starts where a module is imported."""
    names = {name for each in needed_by(module, at_once=True) for name in imports_of(each, True)}
    return bool(TENSORFLOW & {name.split(".")[0] for name in names})


def may_start(module):
    package, _, file = module.removeprefix("kbatch.").partition(".")
    allowed = EXPERIMENTS.get(package, set())
    return module not in BEFORE_TENSORFLOW and (allowed is ... or file in allowed)


def test_only_experiments_start_tensorflow():
    starting = {name for name in MODULES if starts_tensorflow(name)}
    others = {name for name in starting if not may_start(name)}
    assert not others, "import it within the function that needs it"
    # A command and a check of the machine start it when they run; a script's process, after it did.
    elsewhere = [
        n for n in MODULES if not may_start(n) and n.split(".")[1:2] not in (["cli"], ["device"])
    ]
    late = {
        name for name in elsewhere for each, _ in imported(name) if each.split(".")[0] in TENSORFLOW
    }
    assert late <= BEFORE_TENSORFLOW
    listed = {
        f"kbatch.{package}.{file}"
        for package, files in EXPERIMENTS.items()
        if files is not ...
        for file in files
    }
    assert listed - starting == set(), "what does not start it stands in the list no longer"


# The only file that reaches into private parts of these; what it assumes of them is tested.
INTERNALS = "kbatch.library_internals"
PRIVATE_MODULES = ("keras.src", "keras_tuner.src", "tensorflow.python")
# Methods that named tuples have, and `os._exit`.
PUBLIC_UNDERSCORES = {"_asdict", "_exit", "_fields", "_make", "_replace"}
ACCESSES = {"delattr", "getattr", "hasattr", "setattr"}


def test_only_library_internals_imports_private_modules():
    private = tuple(f"{name}." for name in PRIVATE_MODULES)
    others = [name for name in MODULES if name != INTERNALS]
    uses = [(m, name) for m in others for name in imports_of(m) if f"{name}.".startswith(private)]
    assert not uses, f"move it into {INTERNALS}, with a test in tests/test_library_internals.py"


def foreign_underscores():
    """List the attributes with an underscore that are used of others, or made by a library."""
    own = {node.name for _, node in nodes_of((ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for _, node in nodes_of(ast.Name)}
    own |= {n.attr for _, n in nodes_of(ast.Attribute) if isinstance(n.ctx, ast.Store)}
    found = []
    for module, node in nodes_of((ast.Attribute, ast.Call)):
        owner = name = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif name_of(node.func) in ACCESSES:
            owner, name = node.args[0], getattr(node.args[1], "value", None)
        private = re.match(r"_[^_]", str(name)) and name not in PUBLIC_UNDERSCORES
        if private and module != INTERNALS:
            owner = ast.unparse(owner)
            if owner not in ("self", "cls", "super()") or name not in own:
                found.append(f"{module}:{node.lineno} {owner}.{name}")
    return found


def circles(needs):
    """Return the sets of modules that need each other, from the modules that each one needs."""
    together = {frozenset(other for other in needs[name] if name in needs[other]) for name in needs}
    return sorted((set(each) for each in together if len(each) > 1), key=min)


def test_files_do_not_import_each_other():
    names = [name for name in MODULES if name != "kbatch"]
    found = circles({name: needed_by(name, annotations=True) for name in names})
    assert not found, "move what both need into a file that imports neither"


def code_lines(module):
    """Count the lines of a module without docstrings, comments and blank lines."""
    left_out = set()
    for node in nodes_in(module):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            left_out |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = enumerate(map(str.strip, lines_of(MODULES[module])), 1)
    return sum(bool(line) and line[0] != "#" and place not in left_out for place, line in lines)


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def nodes_of(kind):
    return [(name, node) for name in MODULES for node in nodes_in(name) if isinstance(node, kind)]


def count_of(kind, pattern):
    """Count the classes or functions of which a decorator or a base matches a pattern."""
    parts = [[*node.decorator_list, *getattr(node, "bases", ())] for _, node in nodes_of(kind)]
    return sum(any(re.search(pattern, ast.unparse(one)) for one in each) for each in parts)


def bare_excepts():
    """List where `except Exception` has no comment in its line, before it or after it."""
    return [
        f"{module}:{node.lineno}"
        for module, node in nodes_of(ast.ExceptHandler)
        if node.type is None or re.search(r"\bException\b", ast.unparse(node.type))
        if "#" not in "".join(lines_of(MODULES[module])[node.lineno - 2 : node.lineno + 1])
    ]


def line_count(paths):
    return sum(len(lines_of(path)) for path in paths)


def test_errors_are_defined_in_one_file_with_tree():
    errors = [
        (module, node.name)
        for module, node in nodes_of(ast.ClassDef)
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    ]
    assert {module for module, _ in errors} == {"kbatch.errors"}
    text = ast.get_docstring(tree_of("kbatch.errors"))
    tree = {word for line in text.splitlines() for word in line.split()[:3]}
    assert {name for _, name in errors} <= tree


MEASURES = {
    "lines of code in kbatch": lambda: sum(map(code_lines, MODULES)),
    "files in kbatch": lambda: len(MODULES),
    "record types": lambda: count_of(ast.ClassDef, "dataclass|NamedTuple"),
    "properties": lambda: count_of(ast.FunctionDef, "property"),
    "underscore attributes of other objects": foreign_underscores,
    "except Exception without a comment": bare_excepts,
    "lines of tests": lambda: line_count(Path(__file__).parent.rglob("*.py")),
}


@pytest.mark.parametrize("what", LIMITS)
def test_counts_stay_within_limits(what):
    if what in MEASURES:
        found = MEASURES[what]()
    else:
        found = line_count(MODULES[name] for name in needed_by(what, frozenset(OTHER_DOORS)))
    count = found if isinstance(found, int) else len(found)
    assert count <= LIMITS[what], f"{what}: {found}. Please {TO_DO.get(what, IMPORT_LESS)}."


def test_contributing_names_only_what_there_is():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [one for one in re.findall(r"`([\w./-]+)`", text) if "/" in one]
    missing = [path for path in paths if not (PACKAGE.parent / path).exists()]
    assert len(paths) > 20 and not missing, "correct CONTRIBUTING.md: what it names has moved"
