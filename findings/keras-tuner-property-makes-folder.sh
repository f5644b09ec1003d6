#!/usr/bin/env bash
# keras-tuner 1.4.8: to read `tuner.project_dir` makes the folder.
#
# Run: bash findings/keras-tuner-property-makes-folder.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: a property tells a path and changes nothing.
#
# Seen: after the project folder was renamed from "project" to "moved", reading `tuner.project_dir`
# makes "project" again, empty. A message that names the folder, or a check whether it is still
# there, makes the check true, and the next search begins in the empty folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 keras-tuner==1.4.8 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
mkdir results
venv/bin/python -W ignore - <<'PY'
import os
import sys

import keras
import keras_tuner


def build(hp):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(hp.Int("units", 1, 2))])
    model.compile("sgd", "mse")
    return model


tuner = keras_tuner.RandomSearch(build, "val_loss", directory="results", project_name="project")
os.rename("results/project", "results/moved")
before = sorted(os.listdir("results"))
tuner.project_dir
after = sorted(os.listdir("results"))
print("before", before, "after", after)
sys.exit(0 if (before, after) == (["moved"], ["moved", "project"]) else 1)
PY
