import os
import threading
import time

import keras
import numpy as np
import pytest

from kbatch.errors import InputError
from kbatch.input_pipeline.changes import worker_changes
from kbatch.training.data.batch_source import BatchStream, source_of_py_dataset


class Batches(keras.utils.PyDataset):
    """Four batches of their own number."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.full((2, 3), index, "float32"), np.full(2, os.getpid())


class Stuck(Batches):
    """Never answers in another process."""

    def __init__(self):
        super().__init__()
        self.parent = os.getpid()

    def __getitem__(self, index):
        while os.getpid() != self.parent:
            time.sleep(0.1)
        return super().__getitem__(index)


class Breaking(Stuck):
    """Raises an error in another process."""

    def __getitem__(self, index):
        if os.getpid() != self.parent:
            raise OSError("no file here")
        return super().__getitem__(index)


def changes(dataset, timeout_s=300.0):
    found = worker_changes(dataset, timeout_s=timeout_s)
    assert all((source is None) == (c.reason is not None) for c, source in found)
    tried = {c.name: (c, source) for c, source in found if c.reason is None}
    return tried, {c.name: c.reason for c, _ in found if c.reason is not None}


def first_epoch(source):
    with BatchStream(source) as stream:
        return [stream.next() for _ in range(4)]


def test_every_change_gives_the_same_batches_in_order_and_leaves_the_settings():
    dataset = Batches(workers=2)
    tried, untried = changes(dataset)
    assert "processes" in tried
    for change, source in tried.values():
        batches = first_epoch(source)
        assert [int(x[0, 0]) for x, _ in batches] == [0, 1, 2, 3]
        elsewhere = {int(pids[0]) for _, pids in batches} - {os.getpid()}
        assert bool(elsewhere) is (change.name == "processes")
    assert (dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size) == (2, False, 10)
    assert "one a core" in untried.get("more workers", "one a core")


def test_a_single_worker_may_become_several():
    tried, _ = changes(Batches())
    assert tried["more workers"][0].code.startswith("workers=")
    assert "several threads" in tried["more workers"][0].condition


def test_processes_that_are_there_already_are_not_tried():
    _, untried = changes(Batches(workers=2, use_multiprocessing=True))
    assert "already" in untried["processes"]


@pytest.mark.parametrize(
    ("dataset", "timeout_s", "reason"),
    [(Stuck, 1.0, "gave no batch within 1 s"), (Breaking, 300.0, "no file here")],
)
def test_processes_that_do_not_work_are_told_and_not_waited_for(dataset, timeout_s, reason):
    tried, untried = changes(dataset(), timeout_s)
    assert "processes" not in tried
    assert reason in untried["processes"]


class Slow(Batches):
    """Many batches that leave a file, of which all but the first wait for the end of reading."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        while index > 3 and not (self.folder / "end").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        (self.folder / str(index)).touch()
        return super().__getitem__(index)


@pytest.mark.parametrize("use_multiprocessing", [False, True])
def test_workers_end_without_making_what_waits_in_the_queue(tmp_path, use_multiprocessing):
    def ours():
        # TensorFlow's own threads are named so once they have run Python.
        return {one for one in threading.enumerate() if not one.name.startswith("Dummy")}

    before = ours()
    settings = {"workers": 2, "use_multiprocessing": use_multiprocessing, "max_queue_size": 100}
    source = source_of_py_dataset(Slow(tmp_path), settings)
    with BatchStream(source) as stream:
        stream.next()
        (tmp_path / "end").touch()
    until_s = time.monotonic() + 300
    while left := ours() - before:
        assert time.monotonic() < until_s, left
        time.sleep(0.05)
    # The queue holds 100.
    assert len(list(tmp_path.iterdir())) < 50


class Broken(Batches):
    """Raises an error at one of its batches."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise OSError("no file here")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_an_error_in_a_batch_is_ours_and_ends_the_workers(workers, at):
    source = source_of_py_dataset(Broken(at), {"workers": workers, "max_queue_size": 10})
    with pytest.raises(InputError, match=rf"error at batch {at} .*no file here"):
        first_epoch(source)
