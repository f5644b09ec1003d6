#!/usr/bin/env bash
# keras-tuner 1.4.8 with Keras 3.15.1: an objective given by name is minimised for the F1
# score, R2 and cosine similarity, which Keras itself says are better when they are higher.
#
# Run: bash findings/keras-tuner-minimises-f1.sh      (needs Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: `objective="val_f1_score"` is maximised, as `val_accuracy` and `val_auc` are, or refused
# with a request for a direction, as a name is that keras-tuner does not know.
#
# Seen: the oracle ranks the trial with the lowest F1 first. `get_best_hyperparameters` returns the
# worst trial of a finished search, without a warning.
#
# Cause: keras-tuner lists the metrics to maximise by name (accuracies, AUC, precision, recall and
# sensitivity at a value). Every other name that `keras.metrics` or `keras.losses` has is taken for
# one to minimise. Keras's metrics state their own direction in `_direction`, which is not read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 keras-tuner==1.4.8 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import sys

import keras
import keras_tuner

METRICS = {
    "val_f1_score": keras.metrics.F1Score(),
    "val_r2_score": keras.metrics.R2Score(),
    "val_cosine_similarity": keras.metrics.CosineSimilarity(),
    "val_auc": keras.metrics.AUC(),
}


def directions(name, metric):
    """Return the direction of keras-tuner's objective, and that of Keras's metric."""
    oracle = keras_tuner.oracles.RandomSearchOracle(objective=name, max_trials=2)
    return oracle.objective.direction, metric._direction


def best_f1():
    """Return the F1 of the trial that a search for the best F1 names."""

    class Search(keras_tuner.RandomSearch):
        def run_trial(self, trial, **arguments):
            return {"val_f1_score": trial.hyperparameters.Choice("f1", [0.2, 0.9])}

    tuner = Search(objective="val_f1_score", max_trials=2, directory="search", seed=0)
    tuner.search(verbose=0)
    return tuner.get_best_hyperparameters()[0].get("f1")


found = {name: directions(name, metric) for name, metric in METRICS.items()}
print(f"keras-tuner {keras_tuner.__version__}, Keras {keras.__version__}")
for name, (tuner, own) in found.items():
    print(f"{name}: keras-tuner {tuner}, Keras {own}")
best = best_f1()
print(f"best of the F1 values 0.2 and 0.9 by keras-tuner: {best}")
seen = {name: ("min", "up") for name in METRICS} | {"val_auc": ("max", "up")}
sys.exit(found != seen or best != 0.2)
PY
