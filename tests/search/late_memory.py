"""A search whose device has less memory than it was told: run as a child with a small allocator.

Writes a study into a directory: `auto` or, with what that came to and memory enough, `given`.
"""

import sys
from pathlib import Path

import memory_models

import kbatch


def build():
    return memory_models.conv_net()


def run(directory: Path, name: str, sizes: tuple[int, ...], **settings):
    hypermodel = kbatch.BatchSizeHyperModel(
        build,
        sizes,
        dtype_policy="float32",
        base_batch_size=64,
        steps_per_execution=1,
        seed=0,
        **settings,
    )
    tuner = kbatch.BatchSizeTuner(
        hypermodel, "val_loss", directory=directory, project_name=name, overwrite=True
    )
    tuner.search(
        *memory_models.images(1024),
        validation_data=memory_models.images(64, seed=1),
        epochs=1,
        verbose=0,
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if sys.argv[2] == "auto":
        limit = {"micro_batch_size": "auto", "memory_limit_bytes": 260 * 2**20}
        run(target, "auto", (64, 512, 1024), **limit)
    else:
        found = kbatch.load_study(target / "auto").trials[-1].executions[0].micro_batch_size
        run(target, "given", (512, 1024), micro_batch_size=found)
