"""Faults that the tests of the core must find: each is put into a copy, and its tests are run.

    make mutations
    python tests/mutations.py --only 3,7

A mutation is a piece of source text that occurs once in all of kbatch, what takes its place, and
the test files of which one should turn red. It knows no path, so that it survives a move between
files. One that no longer applies is an error: find what became of the line, or take another one.
"""

import argparse
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAST = "not slow and not gpu and not engine and not runtime and not tracker"
AT_ONCE = 2
LONGEST_S = 300  # Of a processor: a mutation may let a search go on for ever.


class Mutation(NamedTuple):
    old: str
    new: str
    tests: str  # Names of test files, wherever they lie, the likeliest first.


STEP = "accumulated_equals_whole accumulated_execution"
LOSSES = "accumulated_losses"
PRECISION = "accumulated_precision"
NORM = "batch_norm"
MOMENTS = "gradient_moments"
MEMORY = "max_batch_search"
STEPS = "steps_per_execution"

MUTATIONS = [
    # 1 to 8: the accumulating step and the sum of gradients.
    Mutation("return total + tf.ensure_shape(", "return tf.ensure_shape(", STEP),
    Mutation("self.size * self.size if fixed else self.rows", "self.size * self.size", STEP),
    Mutation("return tf.cond(rest > 0,", "return tf.cond(rest < 0,", STEP),
    Mutation("tf.cast(s, v.dtype) if reached else None", "tf.cast(s, v.dtype)", STEP),
    Mutation("tf.tensor_scatter_nd_add(", "tf.tensor_scatter_nd_update(", "summed_gradients"),
    Mutation('half = ("float16", "bfloat16")', "half = ()", PRECISION),
    Mutation("update_state(loss, sample_weight=self.batch.rows)", "update_state(loss)", STEP),
    Mutation("sums.loss + tf.cast(loss, tf.float32)", "tf.cast(loss, tf.float32)", STEP),
    # 9 to 16: losses and their denominators.
    Mutation("= mean * tf.cast(share, mean.dtype)", "= mean", LOSSES),
    Mutation("parts[index] / tf.cast(rows_share, mean.dtype)", "parts[index]", LOSSES),
    Mutation("total = loss * tf.cast(rows_share, loss.dtype)", "total = loss", LOSSES),
    Mutation("value if rows else value * tf.cast(rows_share, value.dtype)", "value", LOSSES),
    Mutation("return tf.reduce_sum(valid * weights)", "return tf.reduce_sum(weights)", LOSSES),
    Mutation("mask_of, (y_pred, values))", "mask_of, (y_pred,))", LOSSES),
    Mutation("return tf.math.divide_no_nan(counted, total)", "return rows_share", LOSSES),
    Mutation("            or _is_custom(loss)\n", "", LOSSES),
    # 17 to 24: BatchNormalization once an update, the loss scale, the moments.
    Mutation("difference**2 * share * (1.0 - share)", "difference**2 * share", NORM),
    Mutation("mean = layer.momentum * mean +", "mean = mean +", NORM),
    Mutation("scaled_loss = model.optimizer.scale_loss(loss)", "scaled_loss = loss", PRECISION),
    Mutation("micro / scale**2, whole / scale**2,", "micro / scale, whole / scale,", MOMENTS),
    Mutation("* rows / tf.maximum(steps - 1.0, 1.0)", "* rows / tf.maximum(steps, 1.0)", MOMENTS),
    Mutation("whole - variance / rows,", "whole + variance / rows,", MOMENTS),
    Mutation("tf.where(epoch_begins, tf.zeros([3]), self._sums)", "self._sums", MOMENTS),
    Mutation("squared_norm(gradients) / rows_share", "squared_norm(gradients)", MOMENTS),
    # 25 to 30: the clock and the windows of throughput.
    Mutation("not self._first_of_fit and shape in self._shapes", "shape in self._shapes", "clock"),
    Mutation("not self._first_of_fit and shape in self._shapes", "not self._first_of_fit", "clock"),
    Mutation("reading.examples - self._reading.examples", "reading.examples", "clock"),
    Mutation(
        "sum(examples[begin:end]) / math.fsum(durations_s[begin:end])",
        "examples[begin] / durations_s[begin]",
        "clock",
    ),
    Mutation("examples[-1] += rest", "pass", "clock"),
    Mutation("train_s=self.train_s - self._epoch_train_s", "train_s=self.train_s", "clock"),
    # 31 to 38: the search for the largest batch and the line through memory.
    Mutation("above - below <= max(1, _TIGHT * below)", "above - below <= 1", MEMORY),
    Mutation("if self._low <= m <= self._high]", "if self._low <= m]", MEMORY),
    Mutation("below * self._middle / memory", "below * self._limit / memory", MEMORY),
    Mutation("[above] - memory) / (above - below)", "[above] - memory) / above", MEMORY),
    Mutation("1.0 if rise >= _TRUSTED_RISE * rest else _FIRST_PART", "1.0", MEMORY),
    Mutation("else max(most, memory_bytes)", "else memory_bytes", MEMORY),
    Mutation("np.polyfit(b, m, 1, w=1 / m)", "np.polyfit(b, m, 1)", MEMORY),
    Mutation("(most_bytes - self.fixed_bytes)", "most_bytes", MEMORY),
    # 39 to 48: the judge and the race.
    Mutation("near = gaps + half <= tolerance", "near = gaps <= tolerance", "judge"),
    Mutation("(gaps - half > tolerance)", "(gaps - half > 0)", "judge"),
    Mutation("if costs[k] <= AS_FAST * least]", "if costs[k] <= least]", "judge"),
    Mutation("(fast, key=lambda k: (pairs", "(fast, key=lambda k: (-pairs", "judge"),
    Mutation("0.9 if self._looks == 1 else 0.3 / self._looks**1.5", "0.9", "judge"),
    Mutation("np.maximum(self._seeds, single)", "self._seeds * 1.0", "judge"),
    Mutation(
        "special.ndtri(level) * table.step) ** 2", "special.ndtri(level) * 0.0) ** 2", "judge"
    ),
    Mutation("-MOST_OCTAVES <= octave < self._ceiling(size)", "-MOST_OCTAVES <= octave", "race"),
    Mutation("if within[size] >= ENOUGH]", "if within[size] >= 0.0]", "race"),
    Mutation("count, count - 1, -1), np.eye", "count, count - 1, -1) * 0, np.eye", "page"),
    # 49 to 54: the plan, and how many steps an execution has.
    Mutation('"given" else equal_parts(rows, most)', '"given" else most', "plan"),
    Mutation("= rows - 1 if whole else size // 2,", "= rows - 1 if whole else size - 1,", "plan"),
    Mutation("if known <= most:", "if known >= most:", "plan"),
    Mutation("half_s(rows) / full_s(rows)", "full_s(rows) / half_s(rows)", "chosen_policy"),
    Mutation("round(execution_s / step_s)", "round(execution_s * step_s)", STEPS),
    Mutation("self._budget.updates - self._clock.updates", "self._budget.updates", STEPS),
    # 55 to 60: the rules of the learning rate, and what follows the batch size.
    Mutation('"sqrt": math.sqrt(kappa)', '"sqrt": kappa', "learning_rates"),
    Mutation("beta_1**2 + (1 - beta_1**2) / 100", "0.0", "learning_rates"),
    Mutation("most) / learning_rate_ratio", "most)", "learning_rates"),
    Mutation("momentum ** batch_size_ratio(", "momentum * batch_size_ratio(", "learning_rates"),
    Mutation("float(steps) / kappa, rounds_up", "float(steps) * kappa, rounds_up", "scaled_model"),
    Mutation("cast(number * self.kappa,", "cast(number / self.kappa,", "scaled_model"),
]


def place_of(mutation: Mutation, folder: Path) -> Path:
    """Find the file of a mutation, and the text in it that is to change."""
    found = [
        path
        for path in (folder / "kbatch").rglob("*.py")
        for _ in range(path.read_text(encoding="utf-8").count(mutation.old))
    ]
    if len(found) != 1:
        raise LookupError(f"its text occurs {len(found)} times: {mutation.old!r}")
    return found[0]


def test_files(mutation: Mutation, folder: Path) -> list[Path]:
    files = [[*(folder / "tests").rglob(f"test_{name}.py")] for name in mutation.tests.split()]
    if not all(len(found) == 1 for found in files):
        raise LookupError(f"one of its tests is not one file: {mutation.tests}")
    return [found[0] for found in files]


def result_of(mutation: Mutation, folder: Path) -> str:
    """Run the tests of a mutation in a copy of the repository; return how they ended."""
    place, files = place_of(mutation, folder), test_files(mutation, folder)
    text = place.read_text(encoding="utf-8")
    words = ["-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", FAST]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    place.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        ended = subprocess.run(
            [sys.executable, *words, *map(str, files)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S)),
        )
    finally:
        place.write_text(text, encoding="utf-8")
    if ended.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"red: no end within {LONGEST_S} s of a processor"
    if ended.returncode not in (0, 1):  # Nothing was collected, or it does not even import.
        return f"broken: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}"
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"red: {failed[0].split(' - ')[0]}" if ended.returncode else "GREEN"


def copied(folder: Path) -> Path:
    for name in ("kbatch", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="numbers of mutations, such as 3,7")
    parser.add_argument("--list", action="store_true", help="list them, and check that they apply")
    arguments = parser.parse_args()
    numbers = [int(n) for n in arguments.only.split(",")] if arguments.only else None
    chosen = {n: m for n, m in enumerate(MUTATIONS, 1) if numbers is None or n in numbers}
    problems = []
    for number, mutation in chosen.items():
        try:
            place, files = place_of(mutation, ROOT), test_files(mutation, ROOT)
        except LookupError as error:
            problems.append(f"mutation {number} no longer applies: {error}")
            continue
        if arguments.list:
            names = " ".join(file.name for file in files)
            print(f"{number:2} {place.relative_to(ROOT)}: {mutation.old!r} -> {mutation.new!r}")
            print(f"   {names}")
    print(*problems, sep="\n", end="\n" if problems else "")
    if arguments.list or problems:
        return bool(problems)
    found: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="kbatch-mutations-") as temporary:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(copied(Path(temporary, str(number))))

        def run(number: int) -> None:
            copy = copies.get()
            try:
                found[number] = result_of(chosen[number], copy)
            finally:
                copies.put(copy)
            print(f"{number:2} {found[number]}", flush=True)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(run, chosen))
    red = [number for number, result in found.items() if result.startswith("red")]
    print(f"{len(red)} of {len(chosen)} red")
    for number in sorted(chosen.keys() - set(red)):
        print(f"not red: {number} {chosen[number].old!r}")
    return len(red) < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
