"""What executions of a search ask their engine for, by the memory that a first task measured."""

import math
from concurrent.futures import Future

import pytest
import searches
import small_models as models
from figure_studies import max_batch_result
from stub_executor import StubExecutor

import kbatch
from kbatch.memory.record import ProbeRecord
from kbatch.records.json_codec import record_text
from kbatch.search.executors import TaskResult, _RayExecutor
from kbatch.search.resources import MEMORY_NAME, MeasuredMemory, Resources, ask_submitit

SIZES = (8, 2250, 4000)
GIB = 2**30
ON_GPU = MeasuredMemory(max_batch_result(), host_bytes=3 * GIB)
ON_CPU = MeasuredMemory(max_batch_result(device="CPU:0"), host_bytes=9 * GIB)


@pytest.fixture(autouse=True)
def explored_here(monkeypatch):
    """The model that shows the search space is built in this process, which is quicker."""
    monkeypatch.setattr(
        "kbatch.search.tuner.explored_space",
        lambda tuner: (lambda explored: (tuner.oracle.get_space(), explored))(tuner._explore()),
    )


class Asked(StubExecutor):
    """Measures first, and keeps what each execution asks for."""

    def __init__(self, memory=ON_GPU, most_bytes=math.inf, **stub):
        super().__init__(**stub)
        self.memory, self.most_bytes, self.asked, self.measured = memory, most_bytes, [], 0

    def with_resources(self, needed):
        if needed.host_memory_bytes + needed.gpu_memory_bytes > self.most_bytes:
            raise MemoryError("the largest node has less")
        self.asked.append(needed)
        return self

    def submit(self, function, search, task):
        if not task.measures:
            return super().submit(function, search, task)
        self.measured += 1
        result = TaskResult({}, "failed", "Traceback\nValueError: no rows")
        if self.memory is not None:
            result = TaskResult({MEMORY_NAME: record_text(self.memory).encode()})
        future = Future()
        future.set_result(result)
        return future


def search(directory, executor, *, micro_batch_size=None, **arguments):
    hypermodel = searches.stock(
        batch_sizes=SIZES, learning_rate_scaling=None, micro_batch_size=micro_batch_size
    )
    defaults = {"resources": "auto", "project_name": "search", "directory": directory}
    tuner = kbatch.BatchSizeTuner(
        hypermodel, "val_accuracy", executor=executor, **(defaults | arguments)
    )
    tuner.search(*models.rows(94), epochs=1, verbose=arguments.get("verbose", 1))
    return {t.batch_size: t for t in kbatch.load_study(tuner).trials}


def device_bytes(batch_size):
    """The line behind `max_batch_result`."""
    return 0.6 * GIB + 2.95e6 * batch_size


def test_each_execution_asks_for_what_its_batch_needs_with_a_margin(tmp_path):
    search(tmp_path, executor := Asked())
    assert [needed.gpus for needed in executor.asked] == [1, 1, 1]
    for needed, size in zip(executor.asked, SIZES, strict=True):
        assert needed.gpu_memory_bytes == pytest.approx(1.25 * device_bytes(size), rel=0.01)
        assert needed.host_memory_bytes == 3.75 * GIB + GIB / 2
        assert needed.time_limit_s is None


def test_on_a_processor_the_steps_count_as_memory_of_the_host(tmp_path):
    search(tmp_path, executor := Asked(ON_CPU))
    for needed, size in zip(executor.asked, SIZES, strict=True):
        host = 9 * GIB + device_bytes(size) - device_bytes(2250)
        assert needed.host_memory_bytes == pytest.approx(1.25 * host + GIB / 2, rel=0.01)
        assert (needed.gpus, needed.gpu_memory_bytes) == (0, 0)


def test_a_batch_that_is_cut_needs_its_micro_batch_and_the_sum_of_its_gradients(tmp_path):
    search(tmp_path, executor := Asked(), micro_batch_size=8)
    whole, *cut = (needed.gpu_memory_bytes for needed in executor.asked)
    assert whole == pytest.approx(1.25 * device_bytes(8), rel=0.01)
    assert cut == pytest.approx([whole + 1.25e8] * 2, rel=0.01)


def test_a_batch_that_is_cut_to_what_fits_needs_that_and_the_sum_of_its_gradients():
    asked = {"longest_s": None, "times": 1}
    whole, cut = (ON_GPU.needed(size, "auto", **asked).gpu_memory_bytes for size in (2250, 9000))
    assert cut == pytest.approx(whole + 1.25e8)
    # All sizes that were tried fitted: more may.
    fits = ProbeRecord(1000, 2**30, "fits", 1.0), ProbeRecord(2000, 2**31, "fits", 1.0)
    steps = max_batch_result(probes=fits, max_batch_size=2000, in_window=False)
    needed = MeasuredMemory(steps, GIB).needed(4000, "auto", **asked)
    assert needed.gpu_memory_bytes == pytest.approx(1.25 * 2**32, rel=0.01)


def test_a_size_below_those_measured_needs_the_weights_at_least():
    far = (ProbeRecord(1000, 2**30, "fits", 1.0), ProbeRecord(2000, 2**32, "fits", 1.0))
    for probes, expected in ((far, 10**8), (far[1:], 2**32)):
        measured = MeasuredMemory(max_batch_result(probes=probes, max_batch_size=2000), GIB)
        needed = measured.needed(8, None, longest_s=None, times=1)
        assert needed.gpu_memory_bytes == math.ceil(1.25 * expected)


def test_the_time_limit_follows_what_has_completed(tmp_path):
    search(tmp_path, executor := Asked(), max_parallel=1)
    trained_s = kbatch.load_study(tmp_path / "search").trials[0].executions[0].total_s
    assert executor.asked[1].time_limit_s == 4 * trained_s + 600


@pytest.mark.parametrize(
    "outcome", [TaskResult({}, "died", "Killed", -9), EOFError("the job is gone")]
)
def test_an_execution_that_ran_out_asks_for_twice_as_much_once(tmp_path, outcome, capsys):
    executor = Asked(outcomes={0: outcome}, turn=None)
    assert search(tmp_path / "once", executor)[8].status == "completed"
    assert executor.ran == [(8, 0), (2250, 0), (4000, 0), (8, 0)]
    first, again = executor.asked[0], executor.asked[3]
    assert again[:3] == pytest.approx([1, *(2 * value for value in first[1:3])])
    assert ("submitted again" if isinstance(outcome, EOFError) else "asks for twice") in (
        capsys.readouterr().out
    )
    executor = Asked(outcomes={0: outcome, 3: outcome}, turn=None)
    assert search(tmp_path / "twice", executor)[8].status != "completed"
    assert len(executor.asked) == 4


def test_an_execution_that_ran_out_and_is_then_lost_runs_once_more(tmp_path):
    outcomes = {0: TaskResult({}, "died", "Killed", -9), 3: EOFError("the job is gone")}
    executor = Asked(outcomes=outcomes, turn=None)
    assert search(tmp_path, executor)[8].status == "completed"
    assert [size for size, _ in executor.ran] == [8, 2250, 4000, 8, 8]
    # The engine takes equal tasks for one.
    tasks = zip(executor.tasks, executor.ran, strict=True)
    assert [task.attempt for task, (size, _) in tasks if size == 8] == [0, 1, 2]


def test_what_no_node_has_fails_with_the_bytes_and_the_others_complete(tmp_path):
    found = search(tmp_path, Asked(most_bytes=16 * GIB))
    assert [found[size].status for size in SIZES] == ["completed", "completed", "out_of_memory"]
    assert (
        "No node has what this execution needs, 4.25 GiB of host memory and 14.5 GiB of a GPU"
    ) in found[4000].failure


def test_a_function_returns_the_executor_for_what_is_needed(tmp_path):
    small, large = Asked(), StubExecutor()
    search(
        tmp_path,
        small,
        resources=lambda needed: large if needed.gpu_memory_bytes > 10 * GIB else small,
    )
    assert (small.ran, large.ran) == ([(8, 0), (2250, 0)], [(4000, 0)])


def test_memory_is_measured_once_in_a_directory(tmp_path):
    search(tmp_path, Asked())
    (tmp_path / "search/trial_0000/kbatch.json").unlink()
    search(tmp_path, executor := Asked())
    assert (executor.measured, len(executor.asked)) == (0, 1)


def test_nothing_is_asked_for_where_memory_could_not_be_measured(tmp_path, capsys):
    found = search(tmp_path, executor := Asked(None))
    assert (executor.measured, executor.asked) == (1, [])
    assert {trial.status for trial in found.values()} == {"completed"}
    assert "memory could not be measured: ValueError: no rows" in capsys.readouterr().out


def test_a_measurement_that_cannot_be_read_is_made_again(tmp_path):
    search(tmp_path, Asked())
    (tmp_path / "search" / MEMORY_NAME).write_text("{")
    (tmp_path / "search/trial_0000/kbatch.json").unlink()
    search(tmp_path, executor := Asked())
    assert (executor.measured, len(executor.asked)) == (1, 1)


@pytest.mark.parametrize("function", [lambda needed: 1 / 0, lambda needed: None])
def test_a_function_that_returns_no_executor_is_named(tmp_path, function):
    with pytest.raises(ValueError, match=r"`resources` must return the executor.*(Zero|NoneType)"):
        search(tmp_path, Asked(), resources=function)


@pytest.mark.parametrize(
    "arguments",
    [
        {"executor": StubExecutor()},
        {"executor": Asked(), "resources": "large"},
        {"executor": "local"},
        {"executor": None, "resources": lambda needed: None},
    ],
)
def test_resources_that_an_executor_cannot_be_asked_for_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match=r'`resources` must be "auto" with submit'):
        search(tmp_path, **arguments)


class Submits:
    """What kbatch asks submitit's executor by."""

    def __init__(self):
        self.parameters = {}

    def update_parameters(self, **given):
        self.parameters |= given


def test_submitit_is_asked_in_its_own_units():
    executor = Submits()
    assert ask_submitit(executor, Resources(1, 5 * GIB, 3 * GIB + 1, 601.0)) is executor
    assert executor.parameters == {"mem_gb": 4, "gpus_per_node": 1, "timeout_min": 11}
    executor = ask_submitit(Submits(), Resources(0, 0, GIB, None))
    assert executor.parameters == {"mem_gb": 1}


class RayOf:
    """A Ray of these nodes."""

    def __init__(self, *nodes):
        self._nodes = nodes

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self._nodes]


def test_ray_is_asked_for_what_one_of_its_nodes_has():
    ray = RayOf({"memory": 512 * GIB}, {"memory": 64 * GIB, "GPU": 8})
    executor = _RayExecutor(ray, {"max_retries": 0})
    executor.with_resources(Resources(0, 0, 100 * GIB, None))
    executor.with_resources(Resources(1, GIB, 60 * GIB, None))
    with pytest.raises(MemoryError, match=str(64 * GIB)):
        executor.with_resources(Resources(1, GIB, 100 * GIB, None))
    with pytest.raises(MemoryError):
        _RayExecutor(RayOf(), {}).with_resources(Resources(0, 0, GIB, None))
    # What was given for each task counts instead.
    given = _RayExecutor(ray, {"memory": GIB, "num_gpus": 8})
    given.with_resources(Resources(1, GIB, 100 * GIB, None))


@pytest.mark.parametrize(
    ("said", "status"),
    [("Memory specification can not be satisfied", "out_of_memory"), ("no controller", None)],
)
def test_a_job_that_no_node_can_run_is_told_from_an_engine_that_is_gone(tmp_path, said, status):
    class Refuses(Asked):
        def submit(self, function, search, task):
            if len(self.asked) == 3:
                raise RuntimeError(f"sbatch: error: {said}")
            return super().submit(function, search, task)

    if status is None:
        with pytest.raises(RuntimeError, match="accepts no more tasks"):
            search(tmp_path, Refuses())
    else:
        assert search(tmp_path, Refuses())[4000].status == status
