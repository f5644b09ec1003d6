import os
import subprocess
import sys

import pytest

from kbatch.records.json_codec import write_whole_file

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from kbatch.records.json_codec import write_whole_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole_file(Path(sys.argv[1]), b"new" * 1000)
except OSError as error:
    sys.exit(f"said: {error}")
"""


def test_a_write_that_fails_halfway_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert "said:" in done.stderr
    assert "give a writable directory" in done.stderr
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_in_the_way_of_the_folder_says_what_to_do(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="give a writable directory") as raised:
        write_whole_file(tmp_path / "taken" / "file", b"")
    assert "taken" in str(raised.value)
