from kbatch.device.control_group import read_memory_kills, read_memory_left_bytes

GIB = 2**30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2_takes_what_is_least_above_the_process(tmp_path):
    write(tmp_path / "jobs", memory__max=8 * GIB, memory__current=0)
    write(tmp_path / "jobs" / "mine", memory__max="max", memory__current=0)
    assert read_memory_left_bytes(tmp_path, "0::/jobs/mine\n") == 8 * GIB
    write(tmp_path / "jobs" / "mine", memory__max=16 * GIB)
    assert read_memory_left_bytes(tmp_path, "0::/jobs/mine\n") == 8 * GIB


def test_no_limit_is_none_in_both_versions(tmp_path):
    write(tmp_path, memory__max="max", memory__current=0)
    assert read_memory_left_bytes(tmp_path, "0::/\n") is None
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=0,
    )
    assert read_memory_left_bytes(tmp_path, "4:memory:/\n3:cpu,cpuacct:/\n") is None


def test_version_1_keeps_each_controller_apart(tmp_path):
    write(tmp_path / "memory" / "job", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=0)
    write(tmp_path / "memory" / "other", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    assert (
        read_memory_left_bytes(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/job\n5:pids:/other\n")
        == 4 * GIB
    )


def test_a_container_sees_its_own_limit_at_the_root(tmp_path):
    """The path is the host's, the mount the container's."""
    write(tmp_path, memory__max=2 * GIB, memory__current=0)
    assert read_memory_left_bytes(tmp_path, "0::/docker/abc\n") == 2 * GIB


def test_what_a_limit_leaves_is_less_what_is_in_use(tmp_path):
    assert read_memory_left_bytes(tmp_path, "0::/\n") is None
    write(tmp_path, memory__max=8 * GIB, memory__current=5 * GIB)
    write(tmp_path / "job", memory__max=4 * GIB, memory__current=GIB // 2)
    assert read_memory_left_bytes(tmp_path, "0::/job\n") == 3 * GIB
    write(tmp_path / "job", memory__current=6 * GIB)  # Above a limit that was lowered.
    assert read_memory_left_bytes(tmp_path, "0::/job\n") == 0


def test_the_kernel_counts_whom_it_killed_for_want_of_memory_in_both_versions(tmp_path):
    assert read_memory_kills(tmp_path, "0::/job\n") == 0
    write(tmp_path / "job", memory__events="low 7\noom 9\noom_kill 3\noom_group_kill 8")
    assert read_memory_kills(tmp_path, "0::/job\n") == 3
    assert read_memory_kills(tmp_path, "0::/\n") == 0
    write(tmp_path / "memory", memory__oom_control="oom_kill_disable 1\nunder_oom 1\noom_kill 5")
    assert read_memory_kills(tmp_path, "4:memory:/docker/abc\n3:cpu:/\n") == 5
