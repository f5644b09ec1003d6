"""Searches, updates and times on the GPU."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def conv_net(width, jit_compile="auto"):
    import memory_models

    # Its steps are not timed before: BatchNormalization sees the other rows.
    return memory_models.conv_net(width, normalized=True, jit_compile=jit_compile)


def search(directory, width, sizes, *, callbacks=(), jit_compile="auto", **settings):
    """Searches sizes for one epoch, and returns the study."""
    import memory_models

    import kbatch

    tuner_settings = {k: settings.pop(k) for k in ("executor", "max_parallel") if k in settings}
    hypermodel = kbatch.BatchSizeHyperModel(
        lambda: conv_net(width, jit_compile), sizes, base_batch_size=sizes[0], seed=0, **settings
    )
    tuner = kbatch.BatchSizeTuner(
        hypermodel,
        "val_loss",
        directory=directory,
        project_name="search",
        **{"strategy": "grid"} | tuner_settings,
    )
    tuner.search(
        *memory_models.images(max(512, *sizes)),
        validation_data=memory_models.images(64, seed=1),
        epochs=1,
        verbose=0,
        callbacks=list(callbacks),
    )
    return kbatch.load_study(tuner)


def facts(study):
    return ", ".join(
        f"{run.batch_size}: {run.status} in parts of {run.micro_batch_size}, "
        f"{run.joules_per_sample} J a sample"
        for trial in study.trials
        for run in trial.executions
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_trial_that_runs_out_halves_its_micro_batch(
    limited, jit_compile, tmp_path, record_property
):
    if jit_compile and not limited.on_gpu:
        pytest.skip("a CPU's process ends where XLA runs out of memory")
    import keras
    import tensorflow as tf

    size = 1024 if limited.on_gpu else 512
    held = []

    # What fits whole, or half of a batch that does not, takes at least 0.45 of the memory. On a
    # CPU a gradient of a convolution takes 0.25 more, however few the examples.
    taken = 0.6 if limited.on_gpu else 0.3

    class TakesMemory(keras.callbacks.Callback):
        """Takes memory when training begins, wherever the size was looked for."""

        def on_train_begin(self, logs=None):
            if not held:
                # In pieces: what is free lies between tensors of the plan.
                pieces = int(taken * limited.limit_bytes / 2**20)
                held.extend(tf.zeros([2**18]) for _ in range(pieces))

    study = search(
        tmp_path,
        limited.width,
        (size,),
        callbacks=[TakesMemory()],
        jit_compile=jit_compile,
        micro_batch_size="auto",
        dtype_policy="float32",
        memory_limit_bytes=limited.limit_bytes,
    )
    record_property("trials", facts(study))
    ((run,),) = [trial.executions for trial in study.trials]
    assert (run.status, run.batch_size_seen) == ("completed", size), run.failure
    (note,) = [note for note in run.notes if note.code == "memory_ran_out"]
    assert run.micro_batch_size <= note.values["after"] <= note.values["before"] // 2


@pytest.mark.parametrize("isolate", [False, True], ids=["in one process", "isolated"])
def test_the_micro_batch_is_found_by_itself(scale, tmp_path, isolate, record_property):
    from tensorflow.python.eager import context

    policy = "mixed_float16" if scale.on_gpu else "float32"
    study = search(
        tmp_path,
        scale.width,
        (32, 64),
        micro_batch_size="auto",
        dtype_policy=policy,
        **({"executor": "local", "max_parallel": 1} if isolate else {}),
        **({} if scale.on_gpu else {"memory_limit_bytes": scale.more_bytes}),
    )
    record_property("trials", facts(study))
    for trial in study.trials:
        (run,) = trial.executions
        assert (run.status, run.dtype_policy) == ("completed", policy)
        assert run.micro_batch_size is not None
        assert run.samples_per_second > 0
        if scale.on_gpu:
            assert run.usage.unavailable is None
            assert run.usage.gpus[0].energy_source is None or run.joules_per_sample > 0
    assert not [note for trial in study.trials for note in trial.notes if "this process" in note]
    assert context.context()._initialized != isolate


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 2e-5), ("mixed_float16", 3e-3)], ids=lambda v: str(v)
)
def test_accumulated_updates_are_those_of_the_whole_batch(policy, tolerance, limited):
    import keras
    import small_models as models
    import tensorflow as tf
    from equal_training import assert_equal_training

    # Products in TensorFloat-32 differ by 1e-3 with their order.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.config.set_dtype_policy(policy)

    def build():
        # Adam divides by rounding errors where gradients are small.
        return models.mlp(optimizer=keras.optimizers.SGD(0.1), jit_compile=True)

    # The last batch is shorter.
    assert_equal_training(build, models.rows(94), tolerance=tolerance)


def test_a_long_step_is_timed_as_long(scale, tmp_path, record_property):
    """A step of 16 times the work: where nobody waits for the device both take as long."""
    import keras
    import keras_tuner
    import tensorflow as tf

    import kbatch

    side = 4096 if scale.on_gpu else 256

    class Work(keras.layers.Layer):
        def __init__(self, times):
            super().__init__()
            self.times = times

        def call(self, x):
            matrix = tf.eye(side) + tf.reduce_mean(x) * 1e-6
            for _ in range(self.times):
                matrix = tf.linalg.l2_normalize(matrix @ matrix)
            return x + tf.stop_gradient(tf.reduce_mean(matrix))

    def build(times):
        model = keras.Sequential([keras.Input((8,)), Work(times), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    data = np.ones((512, 8), "float32"), np.ones((512, 1), "float32")
    seconds = {}
    for times in (4, 64):
        model = build(times)
        trained = kbatch.profile_training(model, *data, batch_sizes=[64])
        seconds["profile_training", times] = trained.updates[0].median_s
        called = kbatch.profile_inference(model, data[0], batch_sizes=[64])
        seconds["profile_inference", times] = np.median(called.timings[0].times_s)
        tuner = keras_tuner.GridSearch(
            kbatch.BatchSizeHyperModel(
                functools.partial(build, times), (64,), dtype_policy="float32"
            ),
            "loss",
            directory=tmp_path,
            project_name=str(times),
        )
        tuner.search(*data, epochs=4, verbose=0)
        (trial,) = kbatch.load_study(tuner).trials
        seconds["a trial", times] = 64 / trial.samples_per_second
    for (name, times), value in seconds.items():
        record_property(f"{name}, {times} products", f"{1e3 * value:.2f} ms")
    for name in dict.fromkeys(name for name, _ in seconds):
        assert seconds[name, 64] > 5 * seconds[name, 4], name


def test_the_demo_runs(scale, tmp_path, record_property):
    policy = [] if scale.on_gpu else ["--policy", "float32"]
    words = ["-m", "kbatch", "demo", "--quick", "--output", str(tmp_path), *policy]
    done = subprocess.run(
        [sys.executable, *words], env=os.environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    import kbatch

    study = kbatch.load_study(tmp_path / "demo-search")
    record_property("trials", facts(study))
    assert [trial.status for trial in study.trials] == ["completed"] * 3
    assert max(trial.metrics["val_accuracy"] for trial in study.trials) > 0.5
