"""Code blocks of Markdown files."""

import re
import shlex
from pathlib import Path

import keras

ROOT = Path(__file__).parents[1]
# What a reader waits for, made short: two sizes, two seconds, few epochs.
BRIEF = (
    (r"powers_of_two\(16, \d+\)", "powers_of_two(16, 32)"),
    (r"time_budget_s=\d+", "time_budget_s=2"),
    (r"(profile_inference\(model, .*time_budget_s=)2", r"\g<1>8"),  # It starts a process.
    (r"TimeBudget\(\d+\)", "TimeBudget(2)"),
    (r"epochs=\d{3,}", "epochs=20"),
)

# What the README takes from its reader.
READER = """\
import keras
from sklearn.datasets import load_digits

digits = load_digits()
x, y = digits.data / 16, digits.target


def build():
    outputs = keras.layers.Dense(10, activation="softmax", dtype="float32")
    hidden = keras.layers.Dense(32, activation="relu")
    model = keras.Sequential([keras.layers.Input((64,)), hidden, outputs])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


"""


def blocks(path, language):
    """Lists the blocks of one language in a Markdown file, in order."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def brief(source):
    """Shortens what code waits for, and leaves what it calls."""
    for pattern, short in BRIEF:
        source = re.sub(pattern, short, source)
    return source


def run_python(path, names, *, ran=None):
    """Runs the Python of a Markdown file from top to bottom, as a reader would, but briefly.

    Blocks that `ran` already under another project name are left out.
    """
    ran = set() if ran is None else ran
    for number, block in enumerate(blocks(path, "python"), start=1):
        plain = re.sub(r'project_name="[\w-]+"', "", block)
        if plain in ran:
            continue
        ran.add(plain)
        before = keras.config.dtype_policy()
        try:
            exec(compile(brief(block), f"{path.name}, block {number}", "exec"), names)
        finally:  # Other tests of the process have the policy that they had.
            keras.config.set_dtype_policy(before)


def kbatch_commands(path):
    """Lists the words after `kbatch` of each command line in a Markdown file."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"kbatch\b", line)]
