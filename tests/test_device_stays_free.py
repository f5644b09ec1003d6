"""No call may start the GPU before its worker has run, because that would leave no memory."""

import pytest
from own_process import printed

# Each call is ended when it starts its worker, and TensorFlow's context is checked.
_PROGRAM = """
import json, sys, tempfile
import keras, numpy as np, tensorflow as tf
from tensorflow.python.eager import context
import kbatch

class WorkerStarts(BaseException):
    pass

def look(event, arguments):
    if event == "subprocess.Popen" and "kbatch.device.worker import main" in str(arguments[1]):
        raise WorkerStarts

def build():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model

def batches(size):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)

x, y = np.zeros((64, 4), "float32"), np.zeros((64, 2))
folder = tempfile.mkdtemp()

def isolated(objective, name):
    hypermodel = kbatch.BatchSizeHyperModel(build, [8, 16])
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        objective,
        strategy="grid",
        executor="local",
        max_parallel=1,
        directory=folder,
        project_name=name,
    )
    tuner.search(x, y, validation_split=0.5, epochs=1, verbose=0)

calls = {
    "max batch of arrays": lambda: kbatch.find_max_batch_size(build, x, y),
    "max batch of a function": lambda: kbatch.find_max_batch_size(build, batches),
    "max batch of one example": lambda: kbatch.find_max_batch_size(
        build, x, y, longest_example=(x[0], y[0])
    ),
    "training profile": lambda: kbatch.profile_training(build, x, y, batch_sizes=[8]),
    "training profile of a function": lambda: kbatch.profile_training(build, batches),
    "recommendation": lambda: kbatch.recommend(build, x, y, time_budget_s=5),
    "isolated search": lambda: isolated("val_loss", "a"),
    "isolated search for a metric": lambda: isolated("val_mean_absolute_error", "b"),
}
sys.addaudithook(look)
found = {}
for name, call in calls.items():
    try:
        call()
        found[name] = "no worker"
    except WorkerStarts:
        found[name] = bool(context.context()._initialized)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_devices_start_after_the_worker():
    found = printed("-c", _PROGRAM)
    assert len(found) == 8
    assert {name for name, started in found.items() if started is not False} == set()
