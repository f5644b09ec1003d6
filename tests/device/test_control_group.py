import pytest

from kbatch.device.environment import read_memory_kills, read_memory_left_bytes

GIB = 2**30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("mine", "left"),
    [
        ({"memory__max": "max", "memory__current": 0}, 3 * GIB),
        ({"memory__max": 4 * GIB, "memory__current": 2 * GIB}, 2 * GIB),
        ({"memory__max": 16 * GIB, "memory__current": 2 * GIB}, 3 * GIB),
        # Above a limit that was lowered.
        ({"memory__max": 4 * GIB, "memory__current": 6 * GIB}, 0),
    ],
)
def test_what_a_limit_leaves_is_the_least_of_all_groups_above_the_process(tmp_path, mine, left):
    write(tmp_path / "jobs", memory__max=8 * GIB, memory__current=5 * GIB)
    write(tmp_path / "jobs" / "mine", **mine)
    assert read_memory_left_bytes(tmp_path, "0::/jobs/mine\n") == left
    assert read_memory_left_bytes(tmp_path, "0::/\n") is None


def test_a_container_sees_its_own_limit_at_the_root(tmp_path):
    """The path is the host's, the mount the container's."""
    write(tmp_path, memory__max=2 * GIB, memory__current=0)
    assert read_memory_left_bytes(tmp_path, "0::/docker/abc\n") == 2 * GIB


def test_the_kernel_counts_whom_it_killed_for_want_of_memory(tmp_path):
    assert read_memory_kills(tmp_path, "0::/job\n") == 0
    write(tmp_path / "job", memory__events="low 7\noom 9\noom_kill 3\noom_group_kill 8")
    assert read_memory_kills(tmp_path, "0::/job\n") == 3
    assert read_memory_kills(tmp_path, "0::/\n") == 0
