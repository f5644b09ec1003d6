#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: `fit` and `evaluate` call `on_epoch_end` of a `PyDataset` before
# the first `on_epoch_begin`, after they have read two batches that no step gets.
#
# Run: bash findings/pydataset-ends-before-it-begins.sh  (Python 3.11 to 3.13, 1 GB in /tmp)
# Exit status 0: as described here. 1: the behaviour has changed. Others: the run itself failed.
#
# Expected: begin, the batches, end, for each epoch. `predict` does so, after the same two batches.
#
# Seen, for three batches:
#   fit, 1 epoch    0 1 end begin 0 1 2 end
#   fit, 2 epochs   0 1 end begin 0 1 2 end begin 0 1 2 end
#   evaluate        0 1 end begin 0 1 2 end
#   predict         0 1 begin 0 1 2 end
# As `validation_data` of two epochs, the second validation is preceded by one more end:
#   0 1 end begin 0 1 2 end end begin 0 1 2 end
# So an order that is drawn in `on_epoch_end` is drawn once more than there are epochs, a counter of
# epochs is one too high, and a curriculum that starts there skips its first stage.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  tensorflow==2.21.0 keras==3.15.1 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import sys

import keras
import numpy as np

seen = []


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        seen.append(str(index))
        return np.ones((2, 1)), np.ones((2, 1))

    def on_epoch_begin(self):
        seen.append("begin")

    def on_epoch_end(self):
        seen.append("end")


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
one = np.ones((4, 1))
calls = {
    "fit, 1 epoch": lambda: model.fit(Rows(), epochs=1, shuffle=False, verbose=0),
    "fit, 2 epochs": lambda: model.fit(Rows(), epochs=2, shuffle=False, verbose=0),
    "evaluate": lambda: model.evaluate(Rows(), verbose=0),
    "predict": lambda: model.predict(Rows(), verbose=0),
    "validation": lambda: model.fit(one, one, validation_data=Rows(), epochs=2, verbose=0),
}
found = {}
for name, call in calls.items():
    seen.clear()
    call()
    found[name] = " ".join(seen)
    print(name, "-", found[name])
epoch = "begin 0 1 2 end"
same = found == {
    "fit, 1 epoch": f"0 1 end {epoch}",
    "fit, 2 epochs": f"0 1 end {epoch} {epoch}",
    "evaluate": f"0 1 end {epoch}",
    "predict": f"0 1 {epoch}",
    "validation": f"0 1 end {epoch} end {epoch}",
}
sys.exit(0 if same else 1)
PY
