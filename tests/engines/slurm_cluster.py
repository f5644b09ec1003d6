"""A SLURM cluster of one node on loopback: no systemd, no cgroups, no accounting database.

It needs root and Debian's packages slurm-wlm and munge.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
_START_S = 60.0
_STOP_S = 10.0
# `NoInAddrAny` binds the ports to 127.0.0.1 alone.
_CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory={memory_mb}
PartitionName=trials Nodes={host} Default=YES MaxTime=60
"""
# submitit asks `sacct`, which reads a database: here the controller, which remembers for minutes.
_SACCT = """#!/bin/sh
echo 'JobID|State|NodeList'
exec squeue --noheader --states=all --format='%i|%T|%N'
"""


def missing():
    """Return why no cluster can be started here, None where one can."""
    absent = [daemon for daemon in DAEMONS if shutil.which(daemon, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root here"


@contextlib.contextmanager
def slurm_cluster():
    """Start a cluster, which `sbatch` finds by the environment while the context lasts."""
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        _write_files(folder)
        os.environ |= {"PATH": f"{folder}/bin:{_PATH}", "SLURM_CONF": f"{folder}/slurm.conf"}
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.pop, "SLURM_CONF")
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in munge.items()]
        options += ["--foreground", "--force", f"--log-file={folder}/munge.log"]
        log = stack.enter_context((folder / "daemons.log").open("w"))
        for daemon, *words in (["munged", *options], ["slurmctld", "-D"], ["slurmd", "-D"]):
            # It ends with the tests, also where these are killed.
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", daemon, *words], stdout=log, stderr=log
            )
            stack.callback(_end, process)
        _wait_for_the_node(folder)
        stack.callback(_cancel_jobs)
        yield folder


def _write_files(folder):
    folder.chmod(0o755)  # munged refuses a folder that its clients cannot enter.
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir()
    (folder / "bin" / "sacct").write_text(_SACCT)
    (folder / "bin" / "sacct").chmod(0o755)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    configuration = _CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        controller_port=_free_port(),
        node_port=_free_port(),
        memory_mb=int(0.9 * memory_mb),
    )
    (folder / "slurm.conf").write_text(configuration)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for_the_node(folder):
    if not _waited(lambda: _printed("sinfo", "--noheader", "--format=%T") == "idle", _START_S):
        raise RuntimeError(f"SLURM did not start: {(folder / 'daemons.log').read_text()[-4000:]}")


def _cancel_jobs():
    """End what still runs: a job would outlive the daemons."""
    _printed("scancel", "--user=root", "--full")
    _waited(lambda: _printed("squeue", "--noheader") == "", _STOP_S)


def _printed(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _waited(holds, most_s):
    end_s = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.2)
    return True


def _end(process):
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()
