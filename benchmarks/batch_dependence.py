"""What does the look at predictions by batch size cost, as a share of a profile?

python benchmarks/batch_dependence.py [--seconds 60] [--nets mlp cnn transformer mobilenet]

A profile with its defaults, without memory: processor seconds of the comparison of outputs, its
calls in batches of the smallest size included, over those of the whole profile. At most 2 % are
aimed at. What it finds and does not accuse is in `tests/inference/test_batch_dependence.py`.
"""

import argparse
import functools
import time

from inference_nets import inference_nets

import kbatch
from kbatch.inference.batch_dependence import BatchDependence


def timed(method, spent):
    @functools.wraps(method)
    def called(*args, **kwargs):
        began_s = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.process_time() - began_s)

    return called


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nets", nargs="+", default=["mlp", "cnn", "transformer", "mobilenet"])
    options = parser.parse_args()
    spent: list[float] = []
    for name in ("see", "notes"):
        setattr(BatchDependence, name, timed(getattr(BatchDependence, name), spent))
    print(f"{'net':<13}{'share':>8}{'s':>8}{'profile s':>11}{'sizes':>7}{'largest difference':>20}")
    for net, (model, x) in inference_nets().items():
        if net not in options.nets:
            continue
        spent.clear()
        began_s = time.process_time()
        profile = kbatch.profile_inference(
            model, x, measure_memory=False, time_budget_s=options.seconds
        )
        whole_s = time.process_time() - began_s
        found = [t.size_effect for t in profile.timings if t.size_effect is not None]
        largest = max(effect.difference for effect in found)
        accused = " accused" if any(effect.depends for effect in found) else ""
        print(
            f"{net:<13}{sum(spent) / whole_s:>8.2%}{sum(spent):>8.2f}{whole_s:>11.1f}"
            f"{len(found) + 1:>7}{largest:>20.1e}{accused}",
            flush=True,
        )


if __name__ == "__main__":
    main()
