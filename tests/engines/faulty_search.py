"""A search whose executions end what runs them: faulty_search.py ENGINE FOLDER [SIZE=FAULT...]

Each execution appends its batch size to FOLDER/begun. The first one of a size that has a fault lets
it happen.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras_tuner
import small_models as models

import kbatch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from search_on_cluster import ENGINES

SIZES = (8, 16, 32)


def kill_worker(folder):
    """The process of the engine, as the kernel does where memory runs out."""
    os.kill(os.getppid(), signal.SIGKILL)


def kill_driver(folder):
    os.kill(int((folder / "driver").read_text()), signal.SIGKILL)


def cancel_job(folder):
    subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]], check=True)


def preempt_job(folder):
    """The signal on which submitit puts the job into the queue again."""
    subprocess.run(["scancel", "--signal=USR2", os.environ["SLURM_JOB_ID"]], check=True)


FAULTS = {f.__name__: f for f in (kill_worker, kill_driver, cancel_job, preempt_job)}


class Faulty(keras_tuner.HyperModel):
    def __init__(self, folder, faults):
        super().__init__()
        self.folder, self.faults = folder, faults

    def build(self, hp):
        return models.mlp()

    def fit(self, hp, model, *args, **kwargs):
        size = hp.get("batch_size")
        with (self.folder / "begun").open("a") as lines:
            lines.write(f"{size}\n")
        fault = self.faults.pop(size, None)
        if fault is not None and begun(self.folder)[size] == 1:
            FAULTS[fault](self.folder)
            time.sleep(20 if fault == "kill_driver" else 60)
        return model.fit(*args, **kwargs)


def begun(folder):
    """Count the executions that began, by batch size."""
    path = folder / "begun"
    lines = path.read_text().split() if path.exists() else []
    return {size: lines.count(str(size)) for size in SIZES}


def search(engine, folder, faults):
    hypermodel = kbatch.BatchSizeHyperModel(
        Faulty(folder, faults), SIZES, dtype_policy="float32", seed=0
    )
    with ENGINES[engine](folder) as executor:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            "val_accuracy",
            strategy="grid",
            executor=executor,
            max_parallel=1 if "kill_driver" in faults.values() else None,
            directory=folder,
            project_name="search",
        )
        tuner.search(*models.rows(94), validation_data=models.rows(40, seed=1), epochs=2, verbose=0)
    return kbatch.load_study(tuner)


if __name__ == "__main__":
    engine, folder = sys.argv[1], Path(sys.argv[2])
    (folder / "driver").write_text(str(os.getpid()))
    words = (word.split("=") for word in sys.argv[3:])
    search(engine, folder, {int(size): fault for size, fault in words})
