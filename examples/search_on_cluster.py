"""The same search on SLURM, Ray, Dask or this host alone.

python examples/search_on_cluster.py slurm|ray|dask|local [DIRECTORY]     some minutes

SLURM's and Ray's own environment says where the cluster is; without RAY_ADDRESS, Ray starts on this
host, as Dask does here. DIRECTORY must be shared with SLURM's nodes.
"""

import contextlib
import os
import sys

import keras
from sklearn.datasets import load_digits

import kbatch

SIZES = kbatch.powers_of_two(32, 256)


@contextlib.contextmanager
def slurm(directory):
    import submitit

    # submitit pickles each job into this folder: nobody else may read or write there.
    os.umask(0o077)
    executor = submitit.AutoExecutor(folder=f"{directory}/jobs/%j", cluster="slurm")
    executor.update_parameters(timeout_min=30, mem_gb=2, cpus_per_task=1)  # of one trial
    yield executor


@contextlib.contextmanager
def ray(directory):
    import ray

    ray.init()
    try:
        yield kbatch.ray_executor(num_cpus=1)  # And num_gpus=1, if the cluster has GPUs.
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask(directory):
    from dask.distributed import Client, LocalCluster

    # Client("tls://scheduler:8786", security=...) for a cluster that runs already.
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        yield client


@contextlib.contextmanager
def local(directory):
    yield "local"


ENGINES = {engine.__name__: engine for engine in (slurm, ray, dask, local)}


def build():
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def search(engine, directory, *, batch_sizes=SIZES, epochs=20):
    digits = load_digits()
    # With a micro-batch size of "auto" the first trial runs alone, since it finds the size for all.
    hypermodel = kbatch.BatchSizeHyperModel(
        build, batch_sizes, micro_batch_size=32, dtype_policy="float32", seed=0
    )
    with ENGINES[engine](directory) as executor:
        tuner = kbatch.BatchSizeTuner(
            hypermodel,
            "val_accuracy",
            strategy="grid",
            executor=executor,
            directory=directory,
            project_name="digits",
        )
        tuner.search(digits.data / 16, digits.target, validation_split=0.2, epochs=epochs)
    return tuner.study


def show(study):
    print(study.to_dataframe()[["batch_size", "samples_per_second", "val_accuracy"]])
    print(study.decide())


if __name__ == "__main__":
    engine = sys.argv[1]
    show(search(engine, sys.argv[2] if len(sys.argv) > 2 else f"{engine}-results"))
