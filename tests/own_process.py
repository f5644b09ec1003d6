"""A test file that is a script too, run in a process of its own: what it prints last, as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def printed(file, *arguments):
    done = subprocess.run(
        [sys.executable, file, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def two_replicas():
    """Return a strategy over two logical CPUs, which are made before TensorFlow's first use."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # The graphs of two replicas take far longer to optimise than to run.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
