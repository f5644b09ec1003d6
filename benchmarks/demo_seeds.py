"""Does the demo answer, whatever its seed?

python benchmarks/demo_seeds.py [--data images] [--seeds 10] [--output build/demo-seeds] [--readme]

Runs `kbatch demo` once a seed, each alone. A row a seed: what is named, how sure that is, what is
said of the rate, trainings and seconds. Aims: a size certified for at least 8 of 10 seeds, the
direction of the rate right for all, none certain and wrong, 120 s at most. A named pair is wrong
where its mean validation metric over the trainings of all seeds lies more than the tolerance below
that of the best pair that has at least as many trainings as a race's first judgement takes. The
rate's direction is that of the best of these pairs. `--readme` puts the page and the picture of the
median seed, by seconds, into the README.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import kbatch
from kbatch.study.compare import rate_factor
from kbatch.study.decision import Decision

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.02
LEAST_RUNS = 3  # Of a pair, over all seeds, that is compared.


def ran(seed: int, data: str, output: Path) -> tuple[kbatch.Study, float]:
    """Run a demo in a new folder; return its study, and its seconds."""
    shutil.rmtree(output, ignore_errors=True)
    words = ["-m", "kbatch", "demo", "--data", data, "--seed", str(seed), "--output", str(output)]
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return kbatch.load_study(output / "demo-search"), time.perf_counter() - begun_s


def pooled(studies: list[kbatch.Study]) -> dict[tuple[int, float], float]:
    """Average the metric of each pair that trained often enough, over all seeds."""
    values = defaultdict(list)
    for study in studies:
        for trial in study.trials:
            pair = trial.batch_size, rate_factor(trial)
            values[pair] += [value for value in trial.judged_values if value is not None]
    return {pair: statistics.fmean(own) for pair, own in values.items() if len(own) >= LEAST_RUNS}


def said_of_rate(decision: Decision) -> int:
    """Return 1 if a note calls the user's rate too small, -1 if too large, 0 if there is none."""
    said = [note.values["far"] for note in decision.notes if note.code == "rate_off"]
    return {"small": 1, "large": -1}[said[0]] if said else 0


def quote(decision: Decision) -> str:
    return f"```text\n{decision}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="images")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("build/demo-seeds"))
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    found = [ran(seed, given.data, given.output / str(seed)) for seed in range(given.seeds)]
    studies, seconds = zip(*found, strict=True)
    means = pooled(list(studies))
    best = max(means, key=lambda pair: means[pair])
    truth = (best[1] > 1) - (best[1] < 1)
    print(
        f"{'seed':>4} {'size':>5} {'factor':>6}  {'answer':10}{'rate':>6}{'trainings':>11}{'s':>5}"
    )
    certified = directions = wrong = 0
    for seed, (study, took_s) in enumerate(found):
        decision = study.decide()
        pair = decision.batch_size, rate_factor(decision.trial)
        behind = means[best] - means.get(pair, means[best])
        off = behind > TOLERANCE
        answer = "certain" if decision.certain else "certified" if decision.certified else "open"
        rate = said_of_rate(decision)
        certified += decision.certified
        directions += rate == truth
        wrong += decision.certain and off
        count = sum(len(trial.executions) for trial in study.trials)
        said = {1: "small", -1: "large", 0: "-"}[rate]
        print(
            f"{seed:4} {pair[0]:5} {pair[1]:6.3g}  {answer + ('!' if off else ''):10}{said:>6}"
            f"{count:11}{took_s:5.0f}"
        )
    print(
        f"best of all seeds: {best[0]} at {best[1]:g} times the rule; certified {certified}, "
        f"direction right {directions}, certain and wrong {wrong} of {given.seeds}; "
        f"median {statistics.median(seconds):.0f} s, most {max(seconds):.0f} s"
    )
    middle = sorted(range(given.seeds), key=lambda seed: seconds[seed])[given.seeds // 2]
    text = quote(studies[middle].decide())
    print(f"\nmedian seed {middle}:\n{text}")
    if given.readme:
        readme = ROOT / "README.md"
        before = readme.read_text(encoding="utf-8")
        after = re.sub(r"(?s)```text\n.*?```", lambda _: text, before, count=1)
        readme.write_text(after, encoding="utf-8")
        picture = given.output / str(middle) / "trials.png"
        shutil.copy(picture, ROOT / "docs" / "images" / "trials.png")


if __name__ == "__main__":
    main()
