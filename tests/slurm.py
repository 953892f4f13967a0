"""A Slurm of one machine, with its own configuration in a temporary folder, for tests of batch scripts."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.heads import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

# All daemons listen on the loopback address. Without cgroups, systemd and a database, so this works in a container.
_CONFIGURATION = """
ClusterName=headway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5
KillWait=30
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


# Jobs see only each other, so that `ray stop` in one ends no other Ray of the machine; and all end with slurmd.
_ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@functools.cache
def can_isolate() -> bool:
    """Return whether jobs get a process namespace of their own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_ISOLATED, "true"], capture_output=True, check=False).returncode == 0


def why_not() -> str | None:
    """Return why Slurm cannot be started here, or None."""
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: install slurm-wlm and munge"
    return None if os.geteuid() == 0 else "the test's Slurm runs as root"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm. `environment` makes its commands find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a command of Slurm, and return its output."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.environment, **variables},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(each.split("=", 1) for each in text.split() if "=" in each)

    def logs(self) -> str:
        """Return the ends of the logs of the daemons."""
        return "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Start munged, slurmctld and slurmd, and stop them."""
    # Short: it contains a socket, whose path is limited in length.
    folder = Path(tempfile.mkdtemp(prefix="hws", dir="/tmp"))
    folder.chmod(0o755)  # munged refuses a socket in a folder that others cannot enter
    host, ports = socket.gethostname().partition(".")[0], free_ports(2)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(host=host, folder=folder, controller_port=ports[0], node_port=ports[1])
    )
    # Files in place of the devices of GPUs.
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        (folder / f"gpu{number}").touch()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
        "SLURM_CONF": str(configuration),
    }
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        munge = [
            "munged", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
            f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed",
        ]  # fmt: skip
        for command in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host]):
            with open(folder / f"{command[0]}.out.log", "wb") as log:
                program = [str(_find(command[0])), *command[1:]]
                if command[0] == "slurmd" and can_isolate():
                    # The shell reaps processes whose parents have ended.
                    program = [*_ISOLATED, "sh", "-c", '"$@" & wait', "sh", *program]
                daemons.append(subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=environment))
            if command is munge:
                _wait(lambda: (folder / "munge.socket").exists(), daemons[-1], folder)
        started = Slurm(folder, environment)
        _wait(lambda: "State=IDLE" in _output(started, "scontrol", "show", "node", host), daemons[-1], folder)
        try:
            yield started
        finally:
            # Jobs outlive slurmd.
            subprocess.run(
                ["scancel", "--quiet", "--user", str(os.geteuid())], env=environment, timeout=60, check=False
            )
            _wait(lambda: not _output(started, "squeue", "--noheader"), daemons[-1], folder)
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _find(program: str) -> str | None:
    """Return the path of a program; daemons are in folders that a user's PATH may lack."""
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))


def _output(started: Slurm, *command: str) -> str:
    done = subprocess.run(command, env=started.environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def _wait(
    condition: Callable[[], bool], daemon: subprocess.Popen[bytes], folder: Path, *, within_s: float = 60
) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        logs = Slurm(folder, {}).logs
        assert daemon.poll() is None, f"{daemon.args} has ended{logs()}"
        assert time.monotonic() < deadline, f"Slurm has not come up{logs()}"
        time.sleep(0.2)
