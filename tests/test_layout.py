"""The layout: the order of the packages, what starts TensorFlow, and what a reader must hold."""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kbatch"
# From the lowest on: a module imports from its own package and from those before it.
ORDER = (
    "errors",
    "library_internals",
    "analysis",
    "records",
    "plotting",
    "page",
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
    "cli",
    "__main__",
)
# What only some packages import, whatever stands above them.
ONLY_IN = {
    "jinja2": {"page"},
    "markupsafe": {"page"},
    "rich": {"search", "cli"},
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
    "inference": {"batch_dependence", "call_paths", "measure", "target_search"},
    "input_pipeline": {"blocks", "changes", "measure"},
    "search": ...,
    "recommendation": {"measure"},
}
# An engine's worker imports it, and starts a process that trains.
BEFORE_TENSORFLOW = {"kbatch.search.executors"}
# What a reader pays: kinds of record, and the lines that each of the four doors needs with all that
# it imports. They may only fall.
MOST_RECORD_TYPES = 88
MOST_LINES_BEHIND = {
    "kbatch.training.accumulation.accumulate": 3_790,
    "kbatch.memory.find": 7_680,
    "kbatch.search.hypermodel": 12_300,
    "kbatch.study.study": 4_900,
}
# What is behind another door, opened where a function is called: `Decision.apply` trains, a report
# is drawn when it is written, and a tracker is written to.
OTHER_DOORS = {
    ("kbatch.study.decision", "kbatch.training.learning_rate"),
    ("kbatch.page.document", "kbatch.plotting.canvas"),
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


def imported(tree, module, *, at_once=False, annotations=True):
    """Every imported name with its line.

    Those in functions as well, or `at_once` those of a bare import alone; with those that only
    annotations need, or without.
    """
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                kept = module.split(".")[: -node.level]
                origin = ".".join([*kept, *([origin] if origin else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                yield (whole if origin == "kbatch" or whole in MODULES else origin), node.lineno
        checks = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        later = checks or isinstance(node, (ast.FunctionDef, ast.Lambda))
        if not ((at_once and later) or (checks and not annotations)):
            waiting += ast.iter_child_nodes(node)


def named(tree):
    """Texts that are dotted names of modules of the package, as `import_module` takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if parts[0] == "kbatch" and len(parts) > 1 and parts[1] in ORDER:
                yield node.value, node.lineno


def violations(tree, module):
    """Say which imports a module of this dotted name may not have."""
    place = module.split(".")[1]
    if place not in ORDER:
        return [f"{module}: {place!r} has no place in the order"]
    found = []
    for name, line in (*imported(tree, module), *(() if module == BY_NAME else named(tree))):
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


def test_a_module_imports_from_its_own_package_and_those_before_it():
    modules = [name for name in MODULES if name != "kbatch"]
    assert [fault for name in modules for fault in violations(tree_of(name), name)] == []


@functools.cache
def imports_of(module, at_once=False, annotations=False):
    """Return what a module imports, and the packages around it where it is imported at once."""
    tree = tree_of(module)
    found = {name for name, _ in imported(tree, module, at_once=at_once, annotations=annotations)}
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
    assert {name for name in starting if not may_start(name)} == set()
    # A command and a check of the machine start it when they run; a script's process, after it did.
    elsewhere = [
        n for n in MODULES if not may_start(n) and n.split(".")[1:2] not in (["cli"], ["device"])
    ]
    late = {
        name
        for name in elsewhere
        for each, _ in imported(tree_of(name), name)
        if each.split(".")[0] in TENSORFLOW
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


@functools.cache
def made_in(tree):
    """Return the names that a module defines, and the attributes that it gives itself."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return own | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self", "cls")
    }


def private_uses(tree, module, package=()):
    """Say where a module uses private modules of libraries, or attributes that are not its own.

    Modules of one `package` may use what others of them make.
    """
    own = set.union(made_in(tree), *map(made_in, package))
    read = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            read[node.attr] = node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSES:
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            read |= dict.fromkeys(names, node.lineno)
    found = [
        f"{module}:{line} reads {name}"
        for name, line in read.items()
        if re.match(r"_[^_]", str(name)) and name not in own | PUBLIC_UNDERSCORES
    ]
    return found + [
        f"{module}:{line} imports {name}"
        for name, line in imported(tree, module)
        if f"{name}.".startswith(tuple(f"{one}." for one in PRIVATE_MODULES))
    ]


def test_one_file_reaches_into_private_parts_of_libraries():
    # The hypermodel, the tuner and the files of a trial are one thing to those who search.
    search = [tree_of(name) for name in MODULES if name.startswith("kbatch.search.")]
    found = [
        use
        for name in MODULES
        if name != INTERNALS
        for use in private_uses(
            tree_of(name), name, search if name.startswith("kbatch.search.") else ()
        )
    ]
    assert found == []


def circles(needs):
    """Return the sets of modules that need each other, from the modules that each one needs."""
    together = {frozenset(other for other in needs[name] if name in needs[other]) for name in needs}
    return sorted((set(each) for each in together if len(each) > 1), key=min)


def test_no_files_import_each_other_also_in_functions_and_for_annotations():
    names = [name for name in MODULES if name != "kbatch"]
    assert circles({name: needed_by(name, annotations=True) for name in names}) == []


def record_types(tree):
    """Return the classes that are dataclasses or named tuples."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and re.search(
            "dataclass|NamedTuple", " ".join(map(ast.unparse, node.decorator_list + node.bases))
        )
    ]


def test_the_kinds_of_record_do_not_grow():
    found = [name for module in MODULES for name in record_types(tree_of(module))]
    assert len(found) <= MOST_RECORD_TYPES


@pytest.mark.parametrize("door", MOST_LINES_BEHIND)
def test_what_stands_behind_a_door_does_not_grow(door):
    needed = [MODULES[name] for name in needed_by(door, frozenset(OTHER_DOORS))]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in needed)
    assert lines <= MOST_LINES_BEHIND[door]
