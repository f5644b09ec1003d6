"""One search on SLURM, Ray or Dask: python examples/search_on_cluster.py slurm|ray|dask"""

import contextlib
import os
import sys

import keras
from sklearn.datasets import load_digits

import kbatch


@contextlib.contextmanager
def slurm(directory):
    from submitit import AutoExecutor

    os.umask(0o077)  # submitit pickles jobs into this folder: keep others out
    executor = AutoExecutor(folder=f"{directory}/jobs/%j", cluster="slurm")
    executor.update_parameters(timeout_min=30, mem_gb=2, cpus_per_task=1)  # of each run
    yield executor


@contextlib.contextmanager
def ray(directory):
    import ray

    with ray.init():  # a new Ray on this host if RAY_ADDRESS is not set
        yield kbatch.ray_executor(num_cpus=1)  # and num_gpus=1, if the cluster has GPUs


@contextlib.contextmanager
def dask(directory):
    from dask.distributed import Client

    # For a cluster that runs: Client("tls://scheduler:8786", security=...).
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        yield client


ENGINES = {"slurm": slurm, "ray": ray, "dask": dask}


def build():
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def search(engine, directory, *, batch_sizes=(32, 64, 128, 256), epochs=20):
    # With micro_batch_size="auto", the first run would train alone to find it for all others.
    settings = {"micro_batch_size": 32, "dtype_policy": "float32", "seed": 0}
    hypermodel = kbatch.BatchSizeHyperModel(build, batch_sizes, **settings)
    with ENGINES[engine](directory) as executor:
        how = {"executor": executor, "directory": directory, "project_name": "digits"}
        tuner = kbatch.BatchSizeTuner(hypermodel, "val_accuracy", strategy="grid", **how)
        x, y = load_digits(return_X_y=True)
        tuner.search(x / 16, y, validation_split=0.2, epochs=epochs)
    return tuner.study


if __name__ == "__main__":
    engine = sys.argv[1]
    print(search(engine, f"{engine}-results").decide())
