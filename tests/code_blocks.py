"""Code blocks of Markdown files."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    """Lists the blocks of one language in a Markdown file, in order."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def run_python(path, names):
    """Runs the Python of a Markdown file from top to bottom, as a reader would."""
    for number, block in enumerate(blocks(path, "python"), start=1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)


def kbatch_commands(path):
    """Lists the words after `kbatch` of each command line in a Markdown file."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"kbatch\b", line)]
